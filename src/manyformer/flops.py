"""How many operations a computation takes, by watching which matrix products torch is asked for."""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

FLOP_CONVENTION = (
    "matrix products, convolutions and attention, a multiply-add as two, causal attention in full; not counted: "
    "softmax, norms, activations, gathers, sorting, Fourier transforms, the optimiser"
)
"""What the number means, in words for people."""


def count_flops(job: Callable[[], object]) -> int:
    """The operations of one run of `job`; `FLOP_CONVENTION` says which."""
    counter = FlopCounterMode(display=False, custom_mapping=_unknown_to_torch())
    counter.mod_tracker = _Whole()  # type: ignore[assignment]
    with counter:
        job()
    return int(counter.get_total_flops())


class _Whole:
    """In place of torch's tracker of modules, whose hooks forbid gradients within gradients: all belongs to one whole.

    Layers that are made again on the way back, such as reversible ones, take such gradients.
    """

    parents = frozenset({"Global"})

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _unknown_to_torch() -> dict[Any, Callable[..., int]]:
    """Products inside operators that torch's counter passes over: attention on a CPU, and the chunked loss."""
    mapping: dict[Any, Callable[..., int]] = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    # importing it registers the operator; it is private, and a later torch may have it elsewhere
    with contextlib.suppress(ImportError):
        importlib.import_module("torch.nn.modules.linear_cross_entropy")
    if hasattr(torch.ops.torch_nn, "_linear_cross_entropy_batch_chunked"):
        mapping[torch.ops.torch_nn._linear_cross_entropy_batch_chunked] = _chunked_loss
    return mapping


def _attention(q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> int:
    return int(sdpa_flop_count(q, k, v))  # type: ignore[no-untyped-call]


def _attention_backward(up: Any, q: Any, k: Any, v: Any, *rest: Any, **named: Any) -> int:
    return int(sdpa_backward_flop_count(up, q, k, v))  # type: ignore[no-untyped-call]


def _chunked_loss(x: Any, weight: Any, *rest: Any, **named: Any) -> int:
    """It takes the gradients on the way forward, so that its way back has no products."""
    input_grad, weight_grad, _ = rest[-3:]
    products = 1 + bool(input_grad) + bool(weight_grad)
    return int(2 * products * x[0] * weight[0] * weight[1])
