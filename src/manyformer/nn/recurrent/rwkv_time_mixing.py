"""RWKV-7: layers that see each token together with the one before it, and mix times by the generalized delta rule."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.attention.output_stages import HeadGroupNorm
from manyformer.nn.convolution.depthwise_convolution import ConvolutionTokens, previous_tokens
from manyformer.nn.core import Context, Layer, LayeredStack, LayerOutput, NamedLayers, State, TokenPositions
from manyformer.nn.feed_forward.feedforward import squared_relu
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.linear import ScaledFeatures
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.recurrent_rules import GeneralizedDeltaRule
from manyformer.nn.masks import Causal
from manyformer.nn.positions.position import NoPosition
from manyformer.nn.runtime.device_reads import block_elements
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.length_norms import unit_length
from manyformer.nn.runtime.training_hooks import UndecayedParameters


@final
class TokenShift(nn.Module, UndecayedParameters):
    """x + m_n * (p - x) for each of several vectors m_n, where p is the token before x in its document, or zeros.

    Peng et al. 2025 (RWKV-7, arXiv:2503.14456), section 4, equation 3. The state of a row is its last token."""

    undecayed = ("mix",)

    def __init__(self, initial: Float[Tensor, "n d"]) -> None:
        super().__init__()
        self.mix = nn.Parameter(initial)

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token."""
        return ConvolutionTokens.empty(batch, 1, self.mix.shape[1], device=device, dtype=dtype)

    def forward(
        self, x: Float[Tensor, "b l d"], positions: TokenPositions, state: ConvolutionTokens | None
    ) -> tuple[Sequence[Tensor], ConvolutionTokens | None]:
        """The mixtures; a `state` is continued and the next one returned."""
        previous, state = previous_tokens(x, positions, state)
        return mix_tokens(x, previous, self.mix.to(x.dtype)), state


@final
class ShiftedFeedForward(Layer):
    """W_down relu(W_up x')^2 of the shifted token x' (RWKV-7, section 4.2), with `ff_dim` channels, 4 dim by default.

    The mixture begins at 1 - (i / dim)^`power` for channel i."""

    def __init__(self, dim: int, ff_dim: int | None = None, *, power: float = 1.0) -> None:
        super().__init__()
        ff_dim = 4 * dim if ff_dim is None else ff_dim
        self.shift = TokenShift(initial_mixture(dim, power)[None])
        self.up = nn.Linear(dim, ff_dim, bias=False)
        self.down = nn.Linear(ff_dim, dim, bias=False)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return self.shift.init_state(batch, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        (shifted,), state = self.shift(x, ctx.positions, state)
        return LayerOutput(self.down(squared_relu(self.up(shifted))), state)


def initial_mixture(dim: int, power: float) -> Float[Tensor, " d"]:
    """1 - (i / dim)^power for the channels i."""
    return 1 - (torch.arange(dim) / dim) ** power


MAX_DECAY = math.exp(-0.5)
"""The decay of a token is at least exp(-MAX_DECAY), 0.545."""
NORM_EPS = 64e-5
NORMALIZE_EPS = 1e-24
"""The square of the smallest length by which keys are divided in the released code."""
CHUNK = 32
"""Tokens of a chunk of the recurrence: as each pair has four products, shorter chunks than those of other rules pay."""
MIXTURE_POWERS = {"receptance": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}
"""The exponents of the initial token shift of each projection, in the first layer."""


@final
class LowRankProjection(nn.Module):
    """bias + W_2 activation(W_1 x), with `rank` channels between the matrices; no bias for None."""

    def __init__(
        self, dim: int, rank: int, bias: Tensor | None = None, activation: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.reduce = nn.Linear(dim, rank, bias=False)
        self.expand = nn.Linear(rank, dim, bias=False)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.activation = activation

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        reduced = self.reduce(x)
        y: Tensor = self.expand(reduced if self.activation is None else self.activation(reduced))
        if self.bias is None:
            return y
        return y + self.bias


class TimeMixingState(NamedTuple):
    """The last token of each row, and the kernel's memory."""

    shift: State
    memory: State


class TimeMixingResult(NamedTuple):
    """The output, the values that were written, and the next state."""

    y: Float[Tensor, "b l d"]
    values: Float[Tensor, "b l d"]
    state: TimeMixingState | None


@final
class RWKVTimeMixing(nn.Module):
    """The recurrent branch of layer `number` of `depth` (Peng et al. 2025, arXiv:2503.14456, section 4).

    `head_dim` channels form a head. Biases and mixtures begin as in the released code, but for its small differences
    between the channels of a head. Layers above the first mix their values with `first_values`."""

    def __init__(self, dim: int, head_dim: int, number: int, depth: int) -> None:
        super().__init__()
        heads = dim // head_dim
        share = number / max(depth - 1, 1)
        self.head_dim = head_dim
        powers = [power * (1 - number / depth) for power in MIXTURE_POWERS.values()]
        self.shift = TokenShift(torch.stack([initial_mixture(dim, power) for power in powers]))
        self.r_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        # from slow to fast over the channels, more evenly in deeper layers
        speeds = 6 * (torch.arange(dim) / max(dim - 1, 1)) ** (1 + share**0.3) - 5.5
        self.decay = LowRankProjection(dim, lora_rank(dim, 2.5), speeds, torch.tanh)
        self.rate = LowRankProjection(dim, lora_rank(dim, 2.5), torch.full((dim,), -0.19))
        self.gate = LowRankProjection(dim, lora_rank(dim, 5.0), activation=torch.sigmoid)
        first_value_bias = torch.full((dim,), 0.73)
        self.value_mix = LowRankProjection(dim, lora_rank(dim, 1.7), first_value_bias) if number else None
        self.removal_scale = nn.Parameter(torch.full((dim,), 0.71))
        self.rate_share = nn.Parameter(torch.full((dim,), 1.02))
        self.bonus = nn.Parameter(torch.full((dim,), -0.04))
        self.kernel = LinearKernel(ScaledFeatures(), Causal(), rule=GeneralizedDeltaRule(head_dim), chunk=CHUNK)
        self.norm = HeadGroupNorm(heads, head_dim, heads, centred=True, bias=True, eps=NORM_EPS)
        nn.init.constant_(self.norm.weight, ((number + 1) / depth) ** 0.7)
        self.out_proj = nn.Linear(dim, dim, bias=False)

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> TimeMixingState:
        """The state before any token."""
        shift = self.shift.init_state(batch, device=device, dtype=dtype)
        return TimeMixingState(shift, self.kernel.init_state(batch, device=device, dtype=dtype))

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, state: TimeMixingState | None, first_values: Tensor | None
    ) -> TimeMixingResult:
        """The output for a normalized stream; `first_values` are None in the first layer alone."""
        shift_state, memory = (None, None) if state is None else state
        mixtures, shift_state = self.shift(x, ctx.positions, shift_state)
        r_input, decay_input, k_input, v_input, rate_input, gate_input = mixtures
        r = self.r_proj(r_input)
        k = self.k_proj(k_input)
        v = self.v_proj(v_input)
        if self.value_mix is not None and first_values is not None:
            # a gate of each channel, near 0.68 at first, towards the values of the first layer
            v = v + (first_values - v) * torch.sigmoid(self.value_mix(v_input))
        log_decay = -MAX_DECAY * torch.sigmoid(self.decay(decay_input))
        rate = torch.sigmoid(self.rate(rate_input))
        removal_key = unit_length(self._heads(k * self.removal_scale), eps=NORMALIZE_EPS)
        # k (1 + (rate - 1) share): what is removed faster is written more strongly
        k = k * torch.addcmul(1 - self.rate_share, rate, self.rate_share)
        # under autocast, parameters are wider than projections
        # the rule reads its gates behind the values, in this order
        written = torch.cat([self._heads(v), self._heads(log_decay), removal_key, self._heads(rate)], -1).to(v.dtype)
        q = self._heads(r)
        key = self._heads(k.to(r.dtype))
        call = KernelCall(q, key, written, ctx.positions, ctx.positions, NoPosition(), memory, ctx.watch)
        y, memory, _ = self.kernel(call)
        # what a token itself adds, which no norm scales
        y = self.norm(y) + self._heads(r * k * self.bonus).sum(-1, keepdim=True) * self._heads(v)
        gated = y.transpose(1, 2).flatten(2) * self.gate(gate_input)
        next_state = None
        if state is not None:
            next_state = TimeMixingState(shift_state, memory)
        return TimeMixingResult(self.out_proj(gated.to(v.dtype)), v, next_state)

    def _heads(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l e"]:
        return x.unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # type: ignore[no-untyped-call,no-any-return]


def lora_rank(dim: int, factor: float) -> int:
    """The rank of a projection in the released models: `factor` sqrt(dim), rounded to a multiple of 32."""
    return max(32, 32 * round(factor * math.sqrt(dim) / 32))


@final
class RWKVLayer(Layer):
    """Time mixing behind a norm, then a feed-forward branch; alone it is a first layer."""

    entries = ("continue_values",)

    def __init__(self, time_mixing: RWKVTimeMixing, norm: nn.Module, ff: Layer, dropout: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.time_mixing = time_mixing
        self.ff = ff
        self.dropout = dropout

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        mixing = self.time_mixing.init_state(batch, device=device, dtype=dtype)
        return [mixing, self.ff.init_state(batch, capacity=capacity, device=device, dtype=dtype)]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return self.continue_values(x, ctx, state, None)[0]

    def continue_values(
        self, x: Float[Tensor, "b l d"], ctx: Context, state: State, first_values: Tensor | None
    ) -> tuple[LayerOutput, Float[Tensor, "b l d"]]:
        """The layer's output, and the values that its time mixing wrote."""
        mixing_state, ff_state = (None, None) if state is None else state
        mixed, values, mixing_state = self.time_mixing(self.norm(x), ctx, mixing_state, first_values)
        y, ff_state, loss = self.ff(x + self.dropout(mixed), ctx, ff_state)
        return LayerOutput(y, None if state is None else [mixing_state, ff_state], loss), values


@final
class RWKVStack(NamedLayers, LayeredStack):
    """Layers of RWKV-7 in sequence, which hands the values of the first layer on to all others."""

    def __init__(self, **layers: RWKVLayer) -> None:
        super().__init__(**layers)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        outputs = self._outputs(x, ctx, state)
        next_states = None
        if state is not None:
            next_states = [output.state for output in outputs]
        return LayerOutput(outputs[-1].y if outputs else x, next_states, sum((output.loss for output in outputs), 0.0))

    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        return self._outputs(x, ctx, None)

    def _outputs(self, x: Tensor, ctx: Context, state: State) -> list[LayerOutput]:
        outputs: list[LayerOutput] = []
        first_values = None
        for index, layer in enumerate(self.in_order()):
            assert isinstance(layer, RWKVLayer)
            output, values = layer.continue_values(x, ctx, None if state is None else state[index], first_values)
            # those of the first layer, for all that follow
            first_values = values if first_values is None else first_values
            outputs.append(output)
            x = output.y
        return outputs


def mix_tokens(
    x: Float[Tensor, "b l d"], other: Float[Tensor, "b l d"], shares: Float[Tensor, "n d"]
) -> Sequence[Float[Tensor, "b l d"]]:
    """x + share * (other - x) for each of the n vectors of shares."""
    mixtures: Sequence[Tensor] = _MixTokens.call(x, other, shares)
    return mixtures


class _MixTokens(HandwrittenGradient):
    """Saves the differences alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor, shares: Tensor) -> tuple[Tensor, ...]:
        difference = other - x
        ctx.save_for_backward(difference, shares)
        return tuple(torch.addcmul(x, difference, share) for share in shares)

    @staticmethod
    def backward(ctx: Any, *dmixtures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        difference, shares = ctx.saved_tensors
        dx = torch.zeros_like(difference)
        dother = torch.zeros_like(difference)
        dshares = torch.zeros_like(shares)
        # x + s (o - x) has the slopes 1 - s and s
        rests = 1 - shares
        width = shares.shape[1]
        # all tensors of a block are read while they are in the caches, instead of one after another for each mixture
        tensors = (difference, dx, dother, *dmixtures)
        rows = max(1, block_elements(difference) // width)
        for block, block_dx, block_dother, *dblocks in zip(*(x.reshape(-1, width).split(rows) for x in tensors)):
            for number, dblock in enumerate(dblocks):
                block_dx.addcmul_(dblock, rests[number])
                block_dother.addcmul_(dblock, shares[number])
                dshares[number] += (dblock * block).sum(0)
        return dx, dother, dshares
