"""Columns of construction: on the meta device, with memory that holds nothing, and under other default dtypes."""

from collections.abc import Callable

import torch
from torch import Tensor

from other_tools.comparisons import compare, compare_halves
from other_tools.subject import Subject, output_of


def meta(subject: Subject) -> None:
    """Built without memory, given memory full of NaN, then loaded."""
    model = subject.model()
    inputs = subject.inputs(model)
    with torch.device("meta"):
        other = subject.fresh()
    other.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            # all bits set: NaN in floating point, -1 in whole numbers
            tensor.view(torch.uint8).fill_(255) if tensor.ndim else tensor.fill_(tensor.new_ones(()).fill_(-1))
            if not tensor.ndim and tensor.is_floating_point():
                tensor.fill_(torch.nan)
    other.load_state_dict(model.state_dict())
    compare(output_of(other, inputs), output_of(model, inputs), "logits", 0.0)


def meta_assign(subject: Subject) -> None:
    """Built without memory, then given the tensors of another model."""
    model = subject.model()
    inputs = subject.inputs(model)
    with torch.device("meta"):
        other = subject.fresh()
    other.load_state_dict(model.state_dict(), assign=True)
    compare(output_of(other, inputs), output_of(model, inputs), "logits", 0.0)


def default_dtype(
    dtype: torch.dtype, compare_logits: Callable[[Tensor, Tensor, str], None]
) -> Callable[[Subject], None]:
    """A column: built while `dtype` is the default, with the weights of a model of float32."""

    def column(subject: Subject) -> None:
        model = subject.model()
        inputs = subject.inputs(model)
        expected = output_of(model, inputs)
        torch.set_default_dtype(dtype)
        other = subject.fresh()
        other.load_state_dict(model.state_dict())
        compare_logits(output_of(other, inputs), expected, "logits")

    return column


COLUMNS = {
    "meta": meta,
    "meta, assign": meta_assign,
    "default bf16": default_dtype(torch.bfloat16, compare_halves),
    "default float64": default_dtype(torch.float64, compare),
}
