"""Floating-point operations of a computation, counted with torch's FLOP counter and additional formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

FLOP_CONVENTION = (
    "matrix products, convolutions and attention, a multiply-add as two, causal attention in full; not counted: "
    "softmax, norms, activations, gathers, sorting, Fourier transforms, the optimiser"
)
"""The counting convention as text for reports."""


def count_flops(job: Callable[[], object]) -> int:
    """The floating-point operations of one call of `job`, counted by `FLOP_CONVENTION`."""
    counter = FlopCounterMode(display=False, custom_mapping=_extra_flop_formulas())
    counter.mod_tracker = _NoModuleTracker()  # type: ignore[assignment]
    with counter:
        job()
    return int(counter.get_total_flops())


class _NoModuleTracker:
    """Replaces torch's module tracker and attributes all operations to one "Global" module.

    The hooks of torch's tracker forbid nested gradients, which layers that are recomputed in the backward pass, such
    as reversible ones, take.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _extra_flop_formulas() -> dict[Any, Callable[..., int]]:
    """FLOP formulas of operators that torch's counter ignores: attention and LSTMs on a CPU."""
    mapping: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
        torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
        torch.ops.aten.mkldnn_rnn_layer_backward: lambda *args, **kwargs: 2 * _recurrent_flops(*args),
    }
    return mapping


def _attention_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _attention_backward_flops(grad_output: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad_output, q, k, v))  # type: ignore[no-untyped-call]


def _recurrent_flops(x: Any, input_weight: Any, state_weight: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * x[0] * x[1] * sum(rows * columns for rows, columns in (input_weight, state_weight)))
