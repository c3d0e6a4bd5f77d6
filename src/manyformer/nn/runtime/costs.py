"""Floating-point operations of a computation, counted with torch's FLOP counter and additional formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

FLOP_CONVENTION = (
    "matrix products, convolutions and attention, a multiply-add as two, causal attention in full; not counted: "
    "softmax, norms, activations, gathers, sorting, Fourier transforms, the optimiser"
)
"""The counting convention as text for reports."""


def count_flops(job: Callable[[], object]) -> int:
    """The floating-point operations of one call of `job`, counted by `FLOP_CONVENTION`."""
    counter = FlopCounterMode(display=False, custom_mapping=_extra_flop_formulas())
    # totals need no names of modules
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
    """FLOP formulas of operators that torch's counter ignores on a CPU, attention and LSTMs, or counts wrongly.

    Torch 2.10 refuses attention whose key and value heads are fewer than its query heads.
    """
    aten = torch.ops.aten
    mapping: dict[Any, Callable[..., int]] = {
        aten.mkldnn_rnn_layer: _recurrent_flops,
        aten.mkldnn_rnn_layer_backward: lambda *args, **kwargs: 2 * _recurrent_flops(*args),
    }
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        mapping[getattr(aten, f"_scaled_dot_product_{kernel}")] = _attention_flops
        mapping[getattr(aten, f"_scaled_dot_product_{kernel}_backward")] = _attention_backward_flops
    return mapping


def _attention_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """Scores and their product with the values, for each query head."""
    rows, heads, queries, width = q
    return int(2 * rows * heads * queries * k[2] * (width + v[3]))


def _attention_backward_flops(grad_output: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
    """The scores once more, and the gradients of queries and keys; the gradients of weights and of values."""
    rows, heads, queries, width = q
    return int(2 * rows * heads * queries * k[2] * (3 * width + 2 * v[3]))


def _recurrent_flops(x: Any, input_weight: Any, state_weight: Any, *args: Any, **kwargs: Any) -> int:
    return int(2 * x[0] * x[1] * sum(rows * columns for rows, columns in (input_weight, state_weight)))
