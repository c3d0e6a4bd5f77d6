"""Activation checkpointing: the layers of a stack keep their input alone and are computed again when gradients come."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.depth import ReversibleStack
from manyformer.errors import UserError


def numbered_layers(model: nn.Module) -> Iterator[Layer]:
    """The layers of the model's stacks: those whose name is a number. Raises UserError for a reversible stack."""
    for name, module in model.named_modules():
        if isinstance(module, ReversibleStack):
            raise UserError(
                "remat and fsdp go by layers that are called one by one, and a reversible stack computes its own "
                "again as a whole; it keeps no activations anyway: leave them out, or build it with residual=plain"
            )
        if isinstance(module, Layer) and name.rpartition(".")[2].isdigit():
            yield module


def checkpoint_activations(model: nn.Module) -> None:
    """Let all numbered layers be computed twice (Chen et al. 2016, arXiv:1604.06174), gradients unchanged.

    Dropout draws the same numbers both times. Names and weights stay as they are.
    """
    for layer in list(numbered_layers(model)):
        _wrap(layer)


def _wrap(layer: Layer) -> None:
    once = layer.forward

    def forward(x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        if state is not None or not torch.is_grad_enabled():
            return once(x, ctx, state)
        out: Any = checkpoint(once, x, ctx, use_reentrant=False)
        assert isinstance(out, LayerOutput)
        return out

    layer.forward = forward  # type: ignore[method-assign]
