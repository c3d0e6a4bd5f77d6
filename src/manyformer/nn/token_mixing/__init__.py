"""Token mixing by fixed or learned weights of pairs of positions, independent of what the tokens contain.

`PositionPairs` are the weights; gMLP, the linear and Fourier variants of FNet and the MLP-Mixer are layers made of
weights alone. Synthesizer attention (`synthesizer_attention`) takes them for its scores.
"""

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.attention.kv_cache.kv_source import CacheSpec, KVShape, SelfSource
from manyformer.nn.core import (
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PackedLayout,
    State,
    StepLayout,
    TokenPositions,
    contiguous_positions,
)
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.masks import AllKeys, Mask
from manyformer.nn.ops.softmax_attention import map_documents
from manyformer.nn.runtime.device_reads import is_readable
from manyformer.nn.runtime.devices import float64_device
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.head_selection import PerHeadTensors
from manyformer.nn.runtime.training_hooks import FusedRows, UndecayedParameters


class PositionPairs(PerHeadTensors, ABC):
    """A weight for every pair of positions below `max_length`, for each of `heads`."""

    def __init__(self, max_length: int, heads: int) -> None:
        super().__init__()
        for argument, value in (("max_length", max_length), ("heads", heads)):
            if value < 1:
                raise ValueError(f"{type(self).__name__}: {argument} ({value}) must be at least 1")
        self.max_length = max_length
        self.heads = heads

    @abstractmethod
    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        """The weights of all query-key pairs.

        Raises ValueError for a position that does not exist, unless checking it would synchronize a GPU.
        """

    if TYPE_CHECKING:

        def __call__(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Tensor: ...

    def extra_repr(self) -> str:
        return f"{self.max_length} positions, heads={self.heads}"


@final
class PairTable(PositionPairs):
    """A separate weight for every pair, drawn from N(0, std^2), and fixed if `trainable` is false."""

    head_axes = (("weight", -3),)

    def __init__(self, max_length: int, *, heads: int = 1, std: float, trainable: bool = True) -> None:
        super().__init__(max_length, heads)
        self.weight = nn.Parameter(torch.randn(heads, max_length, max_length) * std, requires_grad=trainable)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
            # a copy, because torch's flop counter fails if a module returns a view of a parameter
            rows, columns = (position_index(part, self.max_length) for part in (query_positions, key_positions))
            return self.weight[None, :, rows, columns].clone()
        check_positions(self.max_length, query_positions, key_positions)
        pairs = self.weight[:, query_positions.position_ids[:, :, None], key_positions.position_ids[:, None]]
        return pairs.transpose(0, 1)


@final
class FactorizedPairs(PositionPairs):
    """The product of a query position's and a key position's vector, both of size `rank` (Tay et al. 2021, 3.3)."""

    head_axes = (("row", -3), ("column", -3))

    def __init__(self, max_length: int, rank: int, *, heads: int = 1, std: float) -> None:
        super().__init__(max_length, heads)
        # the products have a variance of rank * (std / sqrt(rank))^2 = std^2
        scale = (std / rank**0.5) ** 0.5
        self.row = nn.Parameter(torch.randn(heads, max_length, rank) * scale)
        self.column = nn.Parameter(torch.randn(heads, max_length, rank) * scale)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        row, column = (
            vectors[:, position_index(positions, self.max_length)]
            for vectors, positions in ((self.row, query_positions), (self.column, key_positions))
        )
        # rows that share their positions have tables without an axis of rows
        row, column = (part[:, None] if part.ndim == 3 else part for part in (row, column))
        return (row @ column.mT).transpose(0, 1)


@final
class ToeplitzPairs(PositionPairs, UndecayedParameters):
    """A weight for each signed distance: a Toeplitz matrix (Liu et al. 2021, section 4)."""

    undecayed = ("weight",)

    head_axes = (("weight", -2),)

    def __init__(self, max_length: int, *, heads: int = 1, std: float) -> None:
        super().__init__(max_length, heads)
        self.weight = nn.Parameter(torch.randn(heads, 2 * max_length - 1) * std)

    def forward(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b h l s"]:
        check_positions(self.max_length, query_positions, key_positions)
        query_ids, key_ids = (
            positions.position_ids[:1] if isinstance(positions.layout, ContiguousLayout) else positions.position_ids
            for positions in (query_positions, key_positions)
        )
        # shifted so that the most negative distance is entry 0
        distances = query_ids[:, :, None] - key_ids[:, None] + self.max_length - 1
        return self.weight[:, distances].transpose(0, 1)


def position_index(positions: TokenPositions, max_length: int) -> slice | Int[Tensor, "b l"]:
    """The position ids as an index into a table of `max_length` positions.

    Raises ValueError for a position beyond the table, unless checking it would synchronize a GPU.
    """
    if isinstance(positions.layout, StepLayout):
        return positions.position_ids
    if isinstance(positions.layout, ContiguousLayout):
        start = positions.layout.start
        stop = positions.layout.start + positions.position_ids.shape[1]
        _check_position(stop - 1, max_length)
        return slice(start, stop)
    if is_readable(positions.position_ids) and positions.position_ids.numel():
        _check_position(int(positions.position_ids.max()), max_length)
    return positions.position_ids


def check_positions(max_length: int, *positions: TokenPositions) -> None:
    """Raise ValueError for a position beyond `max_length`, unless checking it would synchronize a GPU."""
    # a static step has positions that only tensors know, which must not be read
    if any(isinstance(sequence_positions.layout, StepLayout) for sequence_positions in positions):
        return
    for sequence_positions in positions:
        position_index(sequence_positions, max_length)


def _check_position(last: int, max_length: int) -> None:
    if last >= max_length:
        raise ValueError(f"position {last} does not exist: the model was built for max_length={max_length}")


class GateState(NamedTuple):
    """The state of `SpatialGate`: the gating channels of all previous tokens, and the state of its attention."""

    mixed: State
    attention: State


@final
class SpatialGate(Layer, FusedRows):
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

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"up.weight": (self.norm.normalized_shape[0],) * 2}

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
            # document by document, since the weights of pairs across documents would be zero
            return map_documents(z, z, z, layout, self._mix_document)[:, 0]
        return apply_weights(self._weights(query_positions, key_positions), z)[:, 0]

    def _mix_document(self, q: Tensor, k: Tensor, z: Tensor) -> Float[Tensor, "1 1 l f"]:
        positions = contiguous_positions(1, 0, z.shape[2], z.device)
        return apply_weights(self._weights(positions, positions), z)

    def _weights(self, query_positions: TokenPositions, key_positions: TokenPositions) -> Float[Tensor, "#b 1 l s"]:
        visible = dense_mask(self.mask, query_positions, key_positions, 1)
        # zero, not minus infinity: these are weights, which no softmax follows
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


@final
class LinearMixer(Layer):
    """P X C: one matrix over the tokens of a document, one over channels (Lee-Thorp et al. 2021, section 4.1).

    Learned, it is the paper's "Linear"; not `trainable`, its "Random". Both matrices are drawn such that a token keeps
    its norm if `max_length` tokens are mixed. Shorter documents use the first rows and columns. Raises ValueError for
    documents beyond `max_length`, and for a decoding state."""

    def __init__(self, dim: int, max_length: int, *, trainable: bool = True) -> None:
        super().__init__()
        self.tokens = PairTable(max_length, std=max_length**-0.5, trainable=trainable)
        self.channels = nn.Parameter(torch.randn(dim, dim) * dim**-0.5, requires_grad=trainable)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        raise ValueError("LinearMixer cannot continue from a state: a later token changes all earlier outputs")

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        visible = dense_mask(AllKeys(), ctx.positions, ctx.positions, 1)
        weights = self.tokens(ctx.positions, ctx.positions).masked_fill(~visible, 0.0)
        return LayerOutput(apply_weights(weights, (x @ self.channels)[:, None])[:, 0])


DFTNorm = Literal["backward", "ortho"]
"""Names of torch: the plain sum, or the sum divided by sqrt(n d), which preserves the norm."""


@final
class FourierMixer(Layer):
    """The real part of a Fourier transform over tokens and channels, without parameters (Lee-Thorp et al. 2021, 3.2).

    The paper transforms rows of one length including padding, as does this layer for tokens without segments. With
    segments each document is transformed separately, at its own length, so that padding and packing change nothing.
    `norm` "ortho" preserves the norm of the stream, which matters if no normalization follows; the paper's sums are
    sqrt(l d) times larger. Raises ValueError for any mask but `AllKeys()`, and for a decoding state.
    """

    def __init__(self, mask: Mask | None = None, *, norm: DFTNorm = "backward") -> None:
        super().__init__()
        if mask is not None and mask != AllKeys():
            reason = "each output is a sum over all tokens, including later ones"
            raise ValueError(f"FourierMixer cannot apply the mask {mask!r}: {reason}; it is for encoders")
        self.norm: DFTNorm = norm

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        raise ValueError("FourierMixer cannot continue from a state: a later token changes all earlier outputs")

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(dft_real(x, ctx.positions, self.norm))


def dft_real_reference(
    x: Float[Tensor, "b l d"], positions: TokenPositions, norm: DFTNorm = "backward"
) -> Float[Tensor, "b l d"]:
    """C_n x C_d - S_n x S_d with matrices of cosines and sines (Lee-Thorp et al. 2021, section 3.2).

    n is the document's length; a token's index is its position. Padding gives zeros.
    """
    exact_device = float64_device(x.device)
    same = positions.same_document(positions).to(exact_device)
    position_ids = positions.position_ids.to(exact_device)
    size = same.sum(-1, keepdim=True).clamp(min=1)
    channel = torch.arange(x.shape[2], device=exact_device)
    # products of positions grow large: their remainder modulo n is exact, and its angle is taken in float64
    products = position_ids[:, :, None] * position_ids[:, None]
    token_angle = (products % size).double() / size * (2 * math.pi)
    channel_angle = (channel[:, None] * channel % x.shape[2]).double() / x.shape[2] * (2 * math.pi)
    dtype = torch.promote_types(x.dtype, torch.float32)
    parts = [torch.where(same, part, 0.0) for part in (token_angle.cos(), token_angle.sin())]
    parts += [channel_angle.cos(), channel_angle.sin()]
    cos, sin, channel_cos, channel_sin = (part.to(dtype).to(x.device) for part in parts)
    y = cos @ x.to(dtype) @ channel_cos - sin @ x.to(dtype) @ channel_sin
    if norm == "ortho":
        y = y / (size.double() * x.shape[2]).sqrt().to(dtype).to(x.device)
    return y.to(x.dtype)


def dft_real(
    x: Float[Tensor, "b l d"], positions: TokenPositions, norm: DFTNorm = "backward"
) -> Float[Tensor, "b l d"]:
    """Fast form of `dft_real_reference` for contiguous documents: O(l d log(l d)), no tensors saved for the gradient.

    The transform is its own transpose, so the input's gradient is the transform of the output's gradient.
    """
    if isinstance(positions.layout, ContiguousLayout):
        return _transform(x, norm)
    if isinstance(positions.layout, PackedLayout) and positions.layout.documents:

        def transform_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _transform(v[:, 0], norm)[:, None]

        one_head = x[:, None]
        return map_documents(one_head, one_head, one_head, positions.layout, transform_document)[:, 0]
    return dft_real_reference(x, positions, norm)


def _transform(x: Float[Tensor, "b l d"], norm: DFTNorm) -> Float[Tensor, "b l d"]:
    y: Tensor = _DFTReal.call(x, norm)
    return y


class _DFTReal(HandwrittenGradient):
    has_second_derivative = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: DFTNorm) -> Tensor:
        ctx.norm = norm
        # half precision has no FFT on most devices and is too coarse for sums of thousands of terms
        half = torch.fft.rfft2(x.to(torch.promote_types(x.dtype, torch.float32)), dim=(1, 2), norm=norm).real
        # of real input, channel -m of token k is the conjugate of channel m of token -k
        conjugates = half[..., 1 : (x.shape[2] + 1) // 2].flip(2)
        mirrored = torch.cat([conjugates[:, :1], conjugates[:, 1:].flip(1)], dim=1)
        return torch.cat([half, mirrored], dim=2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _transform(grads[0], ctx.norm), None


@final
class TokenMLP(Layer):
    """Two projections along the token axis with an activation between, shared by channels (Tolstikhin et al. 2021).

    Section 2 of MLP-Mixer. Its weights are for exactly `tokens` tokens. Raises ValueError for any other number, for
    padding or packing, and for a decoding state.
    """

    def __init__(self, tokens: int, ff_dim: int, *, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.tokens = tokens
        self.up = nn.Linear(tokens, ff_dim)
        self.down = nn.Linear(ff_dim, tokens)
        self.activation = nn.GELU() if activation is None else activation
        init_glorot(self.up, self.down)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        raise ValueError("TokenMLP cannot continue from a state: a later token changes all earlier outputs")

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if not isinstance(ctx.positions.layout, ContiguousLayout):
            raise ValueError("TokenMLP has a weight for each column of the row: it allows neither padding nor packing")
        if x.shape[1] != self.tokens:
            raise ValueError(f"TokenMLP mixes exactly {self.tokens} tokens, not {x.shape[1]}")
        return LayerOutput(self.down(self.activation(self.up(x.transpose(1, 2)))).transpose(1, 2))

    def extra_repr(self) -> str:
        return f"{self.tokens} tokens"
