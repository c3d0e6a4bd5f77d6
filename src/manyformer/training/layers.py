"""The layers of a model as a training sees them: the depth of every weight, and layers that are computed again.

Freezing and layer-wise learning rates go by the depth, in a model of one stack. Activation checkpointing lets layers
store their input alone and recomputes the rest in the backward pass."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.nn.core import Context, Layer, LayerOutput, State
from manyformer.nn.streams import StreamRule

STACK = "body"
"""The module that holds the layers of a model with one stack, itself or in one of `NESTED_STACKS`."""

NESTED_STACKS = ("inner", "layers")

LayerChoice = bool | int | Sequence[int]
"""Layers by `activation_checkpointing`: True for all, a number K for every K-th, or their numbers from 1."""


class LayerDepths(NamedTuple):
    """The depth of every weight: 0 in embeddings, 1 in the first layer, `top` in whatever follows the last layer.

    A weight with several names, such as an embedding tied to the output or a table shared by layers, has the least of
    its depths."""

    by_weight: dict[nn.Parameter, int]
    top: int

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.top - 1


def layer_depths(model: nn.Module, setting: str) -> LayerDepths:
    """The depths of a model's weights.

    Raises UserError, beginning with `setting`, for a model without one stack of numbered layers: an encoder with a
    decoder, towers, or one layer that is applied many times."""
    layers = _numbered_layers(model, setting)
    by_weight: dict[nn.Parameter, int] = {}
    top = max(layers.values()) + 1
    # all names of a tied weight, of which the lowest place counts
    for name, weight in model.named_parameters(remove_duplicate=False):
        prefix = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
        if prefix is not None:
            depth = layers[prefix]
        elif name.startswith("embed"):
            depth = 0
        else:
            depth = top
        by_weight[weight] = min(depth, by_weight.get(weight, top))
    return LayerDepths(by_weight, top)


def _numbered_layers(model: nn.Module, setting: str) -> dict[str, int]:
    """The places of the weights of each layer of the model's stack, and the depth of the layer."""
    modules = dict(model.named_modules())
    for stack in (STACK, *(f"{STACK}.{name}" for name in NESTED_STACKS)):
        if stack not in modules:
            continue
        numbers = [name for name, _ in modules[stack].named_children() if name.isdigit()]
        if numbers:
            # how a layer reads and writes streams is trained with the layer
            places = (f"{stack}.", f"{stack}.rule.layers.")
            return {place + number: depth for place in places for depth, number in enumerate(numbers, start=1)}
    parts = ", ".join(name for name, _ in model.named_children())
    raise UserError(f"{setting} needs one stack of layers, each with its own weights; the model has the parts {parts}")


def stack_layers(model: nn.Module) -> Iterator[Layer]:
    """Yield the layers of the model's stacks (their names are numbers). Raises UserError for a reversible stack."""
    for name, module in model.named_modules():
        if isinstance(module, Layer) and module.recomputes:
            raise UserError(
                "activation_checkpointing, compile=layers and fsdp need layers that are called one by one, and a "
                "reversible stack recomputes all of its layers together; it stores no activations anyway: leave them "
                "out, or build the model with residual_streams=plain"
            )
        if isinstance(module, Layer) and name.rpartition(".")[2].isdigit():
            yield module


def checkpoint_activations(model: nn.Module, choice: LayerChoice = 1) -> None:
    """Recompute stack layers in the backward pass (Chen et al. 2016, arXiv:1604.06174); gradients do not change.

    `choice` is True for every layer, a number K for every K-th one, or the numbers of layers, counted from 1. Dropout
    draws the same numbers both times. Module names and weights do not change. Raises UserError for missing layers.
    """
    for layer in chosen_layers(model, choice):
        _checkpoint_layer(layer)


def chosen_layers(model: nn.Module, choice: LayerChoice) -> list[Layer]:
    """The stack layers that `activation_checkpointing` chooses. Raises UserError for missing layers."""
    layers = list(stack_layers(model))
    if choice is True:
        numbers: Sequence[int] = range(1, len(layers) + 1)
    elif isinstance(choice, int):
        numbers = range(choice, len(layers) + 1, choice)
    else:
        numbers = sorted(set(choice))
    if not numbers or numbers[-1] > len(layers):
        text = json_text(choice)
        raise UserError(f"activation_checkpointing is {text}, but the model has {len(layers)} layers, counted from 1")
    return [layers[number - 1] for number in numbers]


def default_compilation(model: nn.Module) -> Literal["layers", "on"]:
    """What is compiled by default: each layer by itself where layers are called one by one, else the model as a whole.

    Equal layers are compiled once, so that the time before the first step does not grow with the depth."""
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    if any(layer.recomputes for layer in layers) or _layers_differ(model) or not any(stack_layers(model)):
        return "on"
    return "layers"


def _layers_differ(model: nn.Module) -> bool:
    """Whether a stack has streams of which each layer computes something else."""
    return any(isinstance(module, StreamRule) and not module.layers_are_alike for module in model.modules())


def compile_layers(model: nn.Module) -> None:
    """Compile each stack layer by itself: equal layers share one compilation.

    Raises UserError for a model without such layers, and for layers of which each would be compiled anew."""
    if _layers_differ(model):
        raise UserError(
            "compile=layers needs layers that are alike, and with these residual_streams each reads and writes by "
            "weights of its own: set compile=on to compile the model as a whole"
        )
    layers = list(stack_layers(model))
    if not layers:
        raise UserError("compile=layers needs a model with a stack of layers; set compile=on to compile it as a whole")
    for layer in layers:
        layer.compile()


def _checkpoint_layer(layer: Layer) -> None:
    layer_forward = layer.forward

    # a layer of a `StreamStack` is also given the rule by which it reads and writes streams
    def forward(x: Any, ctx: Context, state: State = None, *rule: Any) -> LayerOutput:
        # a pass without gradients keeps no activations, and one token of decoding is cheap
        if state is not None or not torch.is_grad_enabled():
            return layer_forward(x, ctx, state, *rule)
        out: Any = checkpoint(layer_forward, x, ctx, None, *rule, use_reentrant=False)
        assert isinstance(out, LayerOutput)
        return out

    # the attribute of this object alone: the class and the names of the weights stay
    layer.forward = forward  # type: ignore[method-assign]
