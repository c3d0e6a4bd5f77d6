"""The depth of every weight in a model of one stack of layers, which freezing and layer-wise learning rates go by."""

from typing import NamedTuple

from torch import nn

from manyformer.errors import UserError

STACK = "body"
"""The module that holds the layers of a model with one stack, itself or in one of `NESTED_STACKS`."""

NESTED_STACKS = ("inner", "layers")


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
    top = len(layers) + 1
    for name, weight in model.named_parameters(remove_duplicate=False):
        prefix = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
        if prefix is not None:
            depth = layers[prefix]
        else:
            depth = 0 if name.startswith("embed") else top
        by_weight[weight] = min(depth, by_weight.get(weight, top))
    return LayerDepths(by_weight, top)


def _numbered_layers(model: nn.Module, setting: str) -> dict[str, int]:
    """The names of the layers of the model's stack and their depths."""
    modules = dict(model.named_modules())
    for stack in (STACK, *(f"{STACK}.{name}" for name in NESTED_STACKS)):
        if stack in modules:
            numbers = [name for name, _ in modules[stack].named_children() if name.isdigit()]
        else:
            numbers = []
        if numbers:
            return {f"{stack}.{number}": depth for depth, number in enumerate(numbers, start=1)}
    parts = ", ".join(name for name, _ in model.named_children())
    raise UserError(f"{setting} needs one stack of layers, each with its own weights; the model has the parts {parts}")
