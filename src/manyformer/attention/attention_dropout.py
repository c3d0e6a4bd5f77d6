"""Dropout of attention weights (Vaswani et al. 2017 in their released code; Child et al. 2019, section 5.4)."""

from torch import nn

from manyformer.errors import UserError
from manyformer.kernels import named_kernels


def set_attention_dropout(model: nn.Module, probability: float) -> None:
    """Drop each softmax weight of a model with this probability in training.

    Raises UserError for a model without softmax kernels, or with a kernel that forms no such weights."""
    if not probability:
        return
    kernels = named_kernels(model)
    softmax_kernels = [kernel for kernel in kernels.values() if kernel.drop_weights(probability)]
    for name, kernel in kernels.items():
        if kernel.has_other_weights or not any(part in softmax_kernels for part in named_kernels(kernel).values()):
            raise UserError(
                f"attention_dropout ({probability}) acts on the weights of softmax kernels, and {name} is a "
                f"{type(kernel).__name__}; leave it at 0, dropout acts on the outputs of all attention"
            )
    if not softmax_kernels:
        raise UserError(f"attention_dropout ({probability}) must be 0: the model has no softmax kernels")
