"""Floating-point operations of a computation, counted with torch's FLOP counter and additional formulas."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

from manyformer.nn.runtime.torch_internals import TorchDispatchMode

FLOP_CONVENTION = (
    "matrix products, convolutions and attention, a multiply-add as two, causal attention in full; not counted: "
    "softmax, norms, activations, gathers, sorting, Fourier transforms, the optimiser"
)
"""The counting convention as text for reports."""


def count_flops(job: Callable[[], object]) -> int:
    """The floating-point operations of one call of `job`, counted by `FLOP_CONVENTION`."""
    counter = _FlopCounter()
    with counter:
        job()
    return counter.total


class _FlopCounter(TorchDispatchMode):
    """Counts as torch's `FlopCounterMode`, without names of modules.

    The hooks by which that one follows modules forbid nested gradients, which layers that are recomputed in the
    backward pass take, such as reversible ones."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        wrap: Callable[[Callable[..., int]], Callable[..., int]] = shape_wrapper
        extra_formulas = {operator: wrap(formula) for operator, formula in _extra_flop_formulas().items()}
        self._formulas = {**flop_registry, **extra_formulas}
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # what an operator consists of may have formulas
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if (formula := self._formulas.get(func.overloadpacket)) is not None:
            self.total += formula(*args, **kwargs, out_val=result)
        return result


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
