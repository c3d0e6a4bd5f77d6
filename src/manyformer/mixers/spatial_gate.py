"""The gated multilayer perceptron (gMLP): half of the channels, mixed over tokens, gates the other half."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import (
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PackedLayout,
    State,
    TokenPositions,
    contiguous_positions,
)
from manyformer.feedforward import init_glorot
from manyformer.masks import AllKeys, Mask
from manyformer.mixers.position_pairs import PositionPairs, position_index
from manyformer.ops.softmax_attention import map_documents
from manyformer.sources import SelfSource
from manyformer.sources.kv_source import CacheSpec, KVShape


class GateState(NamedTuple):
    """The state of `SpatialGate`: the gating channels of all previous tokens, and the state of its attention."""

    mixed: State
    attention: State


@final
class SpatialGate(Layer):
    """down(z1 * (W norm(z2) + b)) with (z1, z2) the halves of GELU(up(x)) (Liu et al. 2021, section 2).

    `weights` are W, one weight per pair of positions, set to 0 where `mask` is false. They start near 0 and b at 1, so
    that the layer begins as an ordinary feed-forward layer. Positions count within each document, so padding and
    packing change nothing. `attention`, from the stream to `ff_dim` / 2 channels, is added to the gate (aMLP, section
    4.3). Raises ValueError for positions beyond those of W.
    """

    def __init__(
        self, dim: int, ff_dim: int, weights: PositionPairs, *, mask: Mask | None = None, attention: Layer | None = None
    ) -> None:
        super().__init__()
        if ff_dim % 2:
            raise ValueError(f"ff_dim ({ff_dim}) must be even: one half of the channels gates the other")
        if weights.heads != 1:
            raise ValueError(f"SpatialGate shares weights over channels: they must have 1 head, not {weights.heads}")
        self.mask = AllKeys() if mask is None else mask
        self.up = nn.Linear(dim, ff_dim)
        self.down = nn.Linear(ff_dim // 2, dim)
        self.activation = nn.GELU()
        self.norm = nn.LayerNorm(ff_dim // 2)
        self.weights = weights
        self.bias = nn.Parameter(torch.ones(weights.max_length))
        self.attention = attention
        self.source = SelfSource()
        init_glorot(self.up, self.down)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        shape = KVShape(1, 0, self.norm.normalized_shape[0])
        mixed_state = self.source.init_state(CacheSpec(batch, shape, capacity, device, dtype))
        if self.attention is None:
            return GateState(mixed_state, ())
        return GateState(mixed_state, self.attention.init_state(batch, capacity=capacity, device=device, dtype=dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        mixed_state, attention_state = (None, None) if state is None else state
        z1, z2 = self.activation(self.up(x)).chunk(2, dim=-1)
        # the cached values have keys of width 0
        keys = self.source(z2, ctx, self._project, mixed_state)
        gate = self._mix(keys.v, ctx.positions, keys.positions) + self._bias(ctx.positions)
        loss = keys.loss
        if self.attention is not None:
            attention_gate, attention_state, loss = self.attention(x, ctx, attention_state)
            gate = gate + attention_gate
        next_state = None
        if state is not None:
            next_state = GateState(keys.state, attention_state)
        return LayerOutput(self.down(z1 * gate), next_state, loss)

    def extra_repr(self) -> str:
        return repr(self.mask)

    def _project(self, z: Float[Tensor, "b s d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        return z.new_empty(z.shape[0], 1, z.shape[1], 0), self.norm(z)[:, None]

    def _mix(
        self, z: Float[Tensor, "b 1 s f"], query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Float[Tensor, "b l f"]:
        layout = query_positions.layout
        if isinstance(layout, PackedLayout) and layout is key_positions.layout and layout.documents:
            return map_documents(z, z, z, layout, self._mix_document)[:, 0]
        return apply_weights(self._weights(query_positions, key_positions), z)[:, 0]

    def _mix_document(self, q: Tensor, k: Tensor, z: Tensor) -> Float[Tensor, "1 1 l f"]:
        positions = contiguous_positions(1, 0, z.shape[2], z.device)
        return apply_weights(self._weights(positions, positions), z)

    def _weights(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b 1 l s"]:
        visible = dense_mask(self.mask, query_positions, key_positions, 1)
        return self.weights(query_positions, key_positions).masked_fill(~visible, 0.0)

    def _bias(self, positions: TokenPositions) -> Float[Tensor, "#b l 1"]:
        bias = self.bias[position_index(positions, self.weights.max_length)]
        if bias.ndim == 1:
            return bias[None, :, None]
        return bias[..., None]


def dense_mask(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int) -> Tensor:
    """The mask as a tensor, (1, h, l, s) if all rows have the same positions."""
    if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
        query_positions, key_positions = (
            positions._replace(position_ids=positions.position_ids[:1], segment_ids=positions.segment_ids[:1])
            for positions in (query_positions, key_positions)
        )
    return mask.dense(query_positions, key_positions, heads)


def apply_weights(weights: Float[Tensor, "#b h l s"], v: Float[Tensor, "b h s f"]) -> Float[Tensor, "b h l f"]:
    """weights @ v, as one product for all rows if they share the weights."""
    if weights.shape[0] == v.shape[0]:
        return weights @ v
    return torch.einsum("hls,bhsf->bhlf", weights[0], v)
