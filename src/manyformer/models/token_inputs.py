"""Checks of what a model is given: tokens of its vocabulary in rows, and batches without any token."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.device_reads import is_readable
from manyformer.errors import UserError
from manyformer.models.output_head import OutputHead


def check_token_rows(tokens: Tensor) -> None:
    """Raise UserError unless tokens are whole numbers in rows."""
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise UserError(
            f"tokens must be whole numbers of shape (batch, length), and these are {tokens.dtype} of shape "
            f"{tuple(tokens.shape)}"
        )


def check_length(length: int, max_length: int | None) -> None:
    """Raise ValueError for a sequence of more than `max_length` tokens; None is no limit."""
    if max_length is not None and length > max_length:
        raise ValueError(f"{length} tokens are more than this model allows: it was built with max_length={max_length}")


def check_token_range(tokens: Int[Tensor, "b l"], vocab: int) -> None:
    """Raise UserError for a token that is none of `vocab`; other devices than a CPU would have to wait for the answer.

    A compiled model does not check either.
    """
    if not is_readable(tokens) or not tokens.numel():
        return
    # NumPy reduces few numbers several times faster than torch
    ids = tokens.numpy()
    if ids.min() < 0 or ids.max() >= vocab:
        raise_token_error(tokens, vocab)


def raise_token_error(tokens: Int[Tensor, "b l"], vocab: int) -> None:
    """Raise UserError for the first token that is none of `vocab`, if there is one."""
    for row, column in ((tokens < 0) | (tokens >= vocab)).nonzero()[:1].tolist():
        raise UserError(
            f"token {int(tokens[row, column])} in row {row}, column {column}: this model was built with vocab={vocab}, "
            f"so tokens must be 0 to {vocab - 1}"
        )


def apply_layer(layer: Layer, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
    """`layer(x, ctx, state)`; a batch without any token stays as it is: many operations refuse empty tensors."""
    return layer(x, ctx, state) if x.numel() else LayerOutput(x, state)


def apply_head(head: OutputHead | nn.Linear, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b v"]:
    """The logits of the stream; empty ones for an empty stream, whose width is not always that of the last layer."""
    if x.numel():
        logits: Tensor = head(x)
        return logits
    return x.new_zeros(*x.shape[:-1], head.out_features if isinstance(head, nn.Linear) else head.classes)
