"""The gated multilayer perceptron: one half of the channels, mixed along the length, gates the other."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, Out, Packed, Place, Plain, State
from manyformer.masks import Everything, Mask
from manyformer.mixers.pairs import Pairs, positions
from manyformer.ops.softmax import each_document
from manyformer.sources import Own
from manyformer.sources.base import Shape


class GateState(NamedTuple):
    """The mixed half of all tokens so far, and what the attention keeps."""

    mixed: State
    attention: State


@final
class SpatialGate(Layer):
    """down(z1 * (W norm(z2) + b)) with (z1, z2) the halves of GELU(up(x)) (Liu et al. 2021, section 2).

    `weights` are W, a number for each pair of positions, which `mask` cuts: under a causal one a token is mixed with
    earlier ones alone. They start near 0 and b at 1, so that the layer begins as an ordinary feed-forward. Positions
    count within each document, so padding and packing change nothing. `attention`, from the stream to half of
    `hidden` channels, adds to the gate (aMLP, section 4.3). Raises ValueError for what has more positions than W.
    """

    def __init__(
        self, dim: int, hidden: int, weights: Pairs, *, mask: Mask | None = None, attention: Layer | None = None
    ) -> None:
        super().__init__()
        if hidden % 2:
            raise ValueError(f"hidden ({hidden}) must be even: one half gates the other")
        if weights.heads != 1:
            raise ValueError(f"SpatialGate mixes all channels alike: its weights must have 1 head, not {weights.heads}")
        self.mask = Everything() if mask is None else mask
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden // 2, dim)
        self.activation, self.norm = nn.GELU(), nn.LayerNorm(hidden // 2)
        self.weights, self.bias = weights, nn.Parameter(torch.ones(weights.longest))
        self.attention, self.source = attention, Own()
        for layer in (self.up, self.down):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def start(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        shape = Shape(1, 0, self.norm.normalized_shape[0])
        kept = self.source.start(batch, shape, folds=False, capacity=capacity, device=device, dtype=dtype)
        if self.attention is None:
            return GateState(kept, ())
        return GateState(kept, self.attention.start(batch, capacity=capacity, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        kept, attended = (None, None) if state is None else state
        z1, z2 = self.activation(self.up(x)).chunk(2, dim=-1)
        # what is kept of a token are values that have no keys
        keys = self.source(z2, ctx, self._project, kept, folds=False)
        gate = self._mix(keys.v, ctx.place, keys.place) + self._bias(ctx.place)
        loss = keys.loss
        if self.attention is not None:
            more, attended, loss = self.attention(x, ctx, attended)
            gate = gate + more
        return Out(self.down(z1 * gate), None if state is None else GateState(keys.state, attended), loss)

    def extra_repr(self) -> str:
        return repr(self.mask)

    def _project(self, z: Float[Tensor, "b s d"], place: Place) -> tuple[Tensor, Tensor]:
        return z.new_empty(z.shape[0], 1, z.shape[1], 0), self.norm(z)[:, None]

    def _mix(self, z: Float[Tensor, "b 1 s f"], at: Place, of: Place) -> Float[Tensor, "b l f"]:
        if isinstance(at.layout, Packed) and at.layout is of.layout and at.layout.documents:
            return each_document(z, z, z, at.layout, self._alone)[:, 0]
        return weigh(self._weights(at, of), z)[:, 0]

    def _alone(self, q: Tensor, k: Tensor, z: Tensor) -> Float[Tensor, "1 1 l f"]:
        place = plain_place(z.shape[2], z.device)
        return weigh(self._weights(place, place), z)

    def _weights(self, at: Place, of: Place) -> Float[Tensor, "#b 1 l s"]:
        return self.weights(at, of).masked_fill(~visible(self.mask, at, of, 1), 0.0)

    def _bias(self, place: Place) -> Float[Tensor, "#b l 1"]:
        found = self.bias[positions(place, self.weights.longest)]
        return found[None, :, None] if found.ndim == 1 else found[..., None]


def plain_place(length: int, device: torch.device) -> Place:
    """The place of one row that is one document without padding."""
    pos = torch.arange(length, device=device)[None]
    return Place(pos, torch.zeros_like(pos), Plain())


def visible(mask: Mask, at: Place, of: Place, heads: int) -> Tensor:
    """The mask written out, (1, h, l, s) where all rows are alike."""
    if isinstance(at.layout, Plain) and isinstance(of.layout, Plain):
        at, of = at._replace(pos=at.pos[:1], seg=at.seg[:1]), of._replace(pos=of.pos[:1], seg=of.seg[:1])
    return mask.dense(at, of, heads)


def weigh(weights: Float[Tensor, "#b h l s"], v: Float[Tensor, "b h s f"]) -> Float[Tensor, "b h l f"]:
    """weights @ v; weights that all rows share are one product, not one a row."""
    if weights.shape[0] == v.shape[0]:
        return weights @ v
    return torch.einsum("hls,bhsf->bhlf", weights[0], v)
