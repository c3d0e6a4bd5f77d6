"""Activation checkpointing: layers store their input only and are recomputed in the backward pass."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.errors import UserError


def stack_layers(model: nn.Module) -> Iterator[Layer]:
    """Yield the layers of the model's stacks (their names are numbers). Raises UserError for a reversible stack."""
    for name, module in model.named_modules():
        if isinstance(module, Layer) and module.recomputes:
            raise UserError(
                "activation_checkpointing and fsdp need layers that are called one by one, and a reversible stack "
                "recomputes all of its layers together; it stores no activations anyway: leave them out, or build the "
                "model with residual_streams=plain"
            )
        if isinstance(module, Layer) and name.rpartition(".")[2].isdigit():
            yield module


def checkpoint_activations(model: nn.Module) -> None:
    """Recompute every stack layer in the backward pass (Chen et al. 2016, arXiv:1604.06174); gradients do not change.

    Dropout draws the same numbers both times. Module names and weights do not change.
    """
    for layer in list(stack_layers(model)):
        _checkpoint_layer(layer)


def _checkpoint_layer(layer: Layer) -> None:
    layer_forward = layer.forward

    def forward(x: Tensor, ctx: Context, state: State = None) -> LayerOutput:
        if state is not None or not torch.is_grad_enabled():
            return layer_forward(x, ctx, state)
        out: Any = checkpoint(layer_forward, x, ctx, use_reentrant=False)
        assert isinstance(out, LayerOutput)
        return out

    layer.forward = forward  # type: ignore[method-assign]
