"""Gates on the outputs of attention heads, before the output projection mixes them."""

from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Layer


class MultiHeadLayer(Layer, ABC):
    """A layer with heads whose outputs `merge_heads` concatenates for the output projection.

    `head_gates` maps the outputs of all heads (b, h, l, f) to gated ones; None, as built, leaves them as they are.
    """

    heads: int

    def __init__(self) -> None:
        super().__init__()
        self.head_gates: nn.Module | None = None

    def merge_heads(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b l hf"]:
        """The outputs of all heads, gated, side by side for each token."""
        gated = y if self.head_gates is None else self.head_gates(y)
        return gated.transpose(1, 2).flatten(2)


@final
class ConstantGates(nn.Module):
    """Multiplies the outputs of heads by `gates`, after `inner` if there were gates before.

    `gates` has one number per head, or one per row and head; it gets gradients if it is a parameter."""

    def __init__(self, gates: Float[Tensor, "... h"], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.gates, self.inner = gates, inner

    def forward(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b h l f"]:
        return (y if self.inner is None else self.inner(y)) * self.gates[..., None, None].to(y)


def attention_heads(model: nn.Module) -> dict[str, MultiHeadLayer]:
    """All layers of `model` with heads, in the order of its modules, by the names that attention maps have.

    A layer that is applied several times, as in a universal transformer, is listed once."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MultiHeadLayer)}
    return {part_name(name): layer for name, layer in layers.items()}


@contextmanager
def gated_heads(model: nn.Module, gates: Mapping[str, Float[Tensor, "... h"]]) -> Iterator[None]:
    """Multiply the outputs of heads inside the block, also in decoding that begins there; 0 switches a head off.

    Michel et al. (2019, arXiv:1905.10650), equation 3. `gates` has for each layer, by its name in `attention_heads`,
    one number per head, or (b, h) for a batch of b rows; layers that are not named stay as they are. For gradients by
    `backward`, gates must be `nn.Parameter`s, which reversible layers need. Raises ValueError for unknown names, wrong
    sizes and other gates that require gradients."""
    layers = attention_heads(model)
    for name, values in gates.items():
        if name not in layers:
            raise ValueError(f"no layer with heads is named '{name}'; there are {', '.join(layers) or 'none'}")
        if values.ndim not in (1, 2) or values.shape[-1] != layers[name].heads:
            shape = tuple(values.shape)
            raise ValueError(f"{name} has {layers[name].heads} heads, but its gates have the shape {shape}")
        if values.requires_grad and not isinstance(values, nn.Parameter):
            raise ValueError(f"the gates of {name} require gradients, so they must be an nn.Parameter")
    previous = {name: layers[name].head_gates for name in gates}
    try:
        for name, values in gates.items():
            layers[name].head_gates = ConstantGates(values, previous[name])
        yield
    finally:
        for name, module in previous.items():
            layers[name].head_gates = module


def part_name(name: str) -> str:
    """A module's name without the segments of wrappers (`inner`, `kernel`)."""
    return ".".join(segment for segment in name.split(".") if segment not in ("inner", "kernel"))
