"""The layer of Mamba-3: a memory by the trapezoidal rule, whose keys and queries turn by learned steps."""

import math
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.convolution.depthwise_convolution import ConvolutionTokens, previous_tokens
from manyformer.nn.core import Context, ContiguousLayout, Layer, LayerOutput, State, TokenPositions
from manyformer.nn.linear import linear_attention, matrix_recurrence
from manyformer.nn.linear.decay_gates import draw_step_biases
from manyformer.nn.ops.document_rows import NO_SEGMENT, segment_runs
from manyformer.nn.runtime.devices import wide_dtype
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.runtime.torch_internals import autocast_disabled
from manyformer.nn.runtime.training_hooks import FusedRows, UndecayedParameters

MIN_RATE = 1e-4
"""The smallest rate at which a memory decays."""


class Mamba3State(NamedTuple):
    """The last key and value of each row, its memories and angles, and the segment id of its last token."""

    previous: ConvolutionTokens
    memory: Float[Tensor, "b h e f"]
    angles: Float[Tensor, "b h a"]
    segment_ids: Int[Tensor, " b"]


class _Rows(NamedTuple):
    """The documents of rows (see `segment_runs`), and their valid tokens; None where all of them are one document."""

    run: Int[Tensor, "b l"] | None
    valid: Bool[Tensor, "b l"] | None
    last_segment: Int[Tensor, " b"]


class _Steps(NamedTuple):
    """The log decay of a memory, and the shares with which the previous token and this one are written."""

    decay: Float[Tensor, "b l h"]
    previous: Float[Tensor, "b l h"]
    current: Float[Tensor, "b l h"]


@final
class Mamba3Mixer(Layer, FusedRows, UndecayedParameters):
    """Mamba-3's layer of rank 1: S_t = a S_(t-1) + b k_(t-1) v_(t-1)^T + c k_t v_t^T (Lahoti et al. 2026).

    arXiv:2603.15569. With a step d, a rate A and a share s of each token and head, a = exp(-d A), b = (1 - s) d a and
    c = s d: the trapezoidal rule, where Mamba-2 has s = 1. Keys and queries are one vector of `state_dim` channels for
    all heads, normalized, with a bias of each head; the first half of their channels is rotated in adjacent pairs by
    angles that grow by pi tanh(x) d. Outputs S_t^T q_t + D v_t are gated by SiLU. There is no convolution. Memories are
    of float32 at least; they begin empty, and angles at 0, in every document, and padding leaves both as they are.

    Both terms are sums of their own here, so that no later token moves an output. Raises ValueError unless `state_dim`
    is a multiple of 4."""

    undecayed = ("key_bias", "query_bias")

    def __init__(self, dim: int, heads: int, *, value_dim: int, state_dim: int) -> None:
        super().__init__()
        if state_dim % 4:
            raise ValueError(f"Mamba3Mixer: state_dim ({state_dim}) must be a multiple of 4, for pairs in half of it")
        self.heads = heads
        self.value_dim = value_dim
        self.state_dim = state_dim
        # gates, values, keys, queries, then steps, rates and shares of heads, and angles
        self._widths = [heads * value_dim] * 2 + [state_dim] * 2 + [heads] * 3 + [state_dim // 4]
        self.in_proj = nn.Linear(dim, sum(self._widths), bias=False)
        self.key_norm = RMSNorm(state_dim, 1e-5)
        self.query_norm = RMSNorm(state_dim, 1e-5)
        self.key_bias = nn.Parameter(torch.ones(heads, state_dim))
        self.query_bias = nn.Parameter(torch.ones(heads, state_dim))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.skip = nn.Parameter(torch.ones(heads))
        self.out_proj = nn.Linear(heads * value_dim, dim, bias=False)
        draw_step_biases(self.dt_bias)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"in_proj.weight": tuple(self._widths)}

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        wide = torch.promote_types(dtype, torch.float32)
        channels = self.heads * (self.state_dim + self.value_dim)
        return Mamba3State(
            ConvolutionTokens.empty(batch, 1, channels, device=device, dtype=wide),
            torch.zeros(batch, self.heads, self.state_dim, self.value_dim, device=device, dtype=wide),
            torch.zeros(batch, self.heads, self.state_dim // 4, device=device, dtype=wide),
            torch.full((batch,), NO_SEGMENT, dtype=torch.long, device=device),
        )

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        gate, *parts = torch.split(self.in_proj(x), self._widths, -1)
        with autocast_disabled(x.device):
            dtype = torch.promote_types(self.dt_bias.dtype, torch.float32)
            y, next_state = self._recur([part.to(dtype) for part in parts], ctx.positions, state)
        y = self.out_proj(y.to(gate.dtype) * F.silu(gate))
        return LayerOutput(y, next_state)

    def _recur(
        self, parts: list[Tensor], positions: TokenPositions, state: Mamba3State | None
    ) -> tuple[Float[Tensor, "b l n"], Mamba3State | None]:
        """What the memories return, with the skip, and the next state if there is one."""
        v, k, q, steps, rates, shares, turns = parts
        before = state
        if before is None:
            before = self.init_state(len(v), device=v.device, dtype=v.dtype)
        rows = _rows_of(positions, before.segment_ids, len(v))
        steps = F.softplus(steps + self.dt_bias)
        if rows.valid is not None:
            # a step of size zero neither decays, writes nor turns
            steps = steps.masked_fill(~rows.valid[..., None], 0.0)
        angles = summed_angles(math.pi * turns.tanh()[:, :, None] * steps[..., None], rows.run, before.angles)
        key, query = (
            rotated(norm(part)[:, :, None] + bias, angles)
            for norm, part, bias in ((self.key_norm, k, self.key_bias), (self.query_norm, q, self.query_bias))
        )
        values = v.unflatten(2, (self.heads, -1))  # type: ignore[no-untyped-call]
        written = torch.cat([key, values], -1).flatten(2)
        earlier, previous = previous_tokens(written, positions, None if state is None else state.previous)
        earlier_key, earlier_values = torch.split(
            earlier.unflatten(2, (self.heads, -1)),  # type: ignore[no-untyped-call]
            [self.state_dim, self.value_dim],
            -1,
        )
        decay, previous_share, share = trapezoid(steps, rates, torch.sigmoid(shares))
        # both sums at once, as twice as many heads, of which the first go on from the memory
        both_keys = torch.cat([share[..., None] * key, previous_share[..., None] * earlier_key], 2).transpose(1, 2)
        both_values = torch.cat([values, earlier_values], 2).transpose(1, 2)
        both_queries = query.transpose(1, 2).repeat(1, 2, 1, 1)
        both_decays = decay.mT[..., None].repeat(1, 2, 1, 1)
        memory = torch.cat([before.memory, torch.zeros_like(before.memory)], 1).to(v.dtype)
        fold = matrix_recurrence.recurrent if v.shape[1] == 1 else linear_attention.chunked
        y, memory = fold(both_queries, both_keys, both_values, both_decays, rows.run, memory)
        first, second = y.chunk(2, 1)
        y = (first + second).transpose(1, 2) + self.skip[:, None] * values
        if state is None:
            return y.flatten(2), None
        assert previous is not None
        first_memory, second_memory = memory.chunk(2, 1)
        # copies, which do not keep the angles of all tokens
        last_angles = torch.remainder(angles[:, -1], 2 * math.pi).clone()
        next_state = Mamba3State(previous, first_memory + second_memory, last_angles, rows.last_segment.clone())
        return y.flatten(2), next_state

    def extra_repr(self) -> str:
        return f"heads={self.heads}, value_dim={self.value_dim}, state_dim={self.state_dim}"


def _rows_of(positions: TokenPositions, last_ids: Int[Tensor, " b"], batch: int) -> _Rows:
    if isinstance(positions.layout, ContiguousLayout):
        return _Rows(None, None, positions.segment_ids[:, -1].expand(batch))
    return _Rows(*segment_runs(positions.segment_ids, last_ids))


def trapezoid(steps: Float[Tensor, "b l h"], rates: Float[Tensor, "b l h"], share: Float[Tensor, "b l h"]) -> _Steps:
    """The decay and the shares of a step between two tokens, from its size, the gate of its rate, and s in [0, 1].

    The rate of a gate x is 1 + x above 0 and 1 / (1 - x) below, at least `MIN_RATE`."""
    # the denominator stays away from 0 where the other branch is taken
    rate = torch.where(rates >= 0, 1 + rates, 1 / (1 - rates.clamp(max=0.0))).clamp(min=MIN_RATE)
    decay = -steps * rate
    return _Steps(decay, (1 - share) * steps * decay.exp(), share * steps)


def summed_angles(
    turns: Float[Tensor, "b l h a"], run: Int[Tensor, "b l"] | None, before: Float[Tensor, "b h a"]
) -> Float[Tensor, "b l h a"]:
    """The sums of turns in each document, from `before` in the first, in float64 where the device has it."""
    wide = turns.to(wide_dtype(turns.device))
    sums = wide.cumsum(1)
    if run is None:
        return (sums + before[:, None]).to(turns.dtype)
    columns = torch.arange(run.shape[1], device=run.device)
    starts = run.diff(prepend=torch.zeros_like(run[:, :1])) > 0
    first = columns.where(starts, 0).cummax(1).values
    # what had been summed before the first token of each document
    earlier = (sums - wide).gather(1, first[..., None, None].expand(turns.shape))
    continued = before[:, None] * (run == 0)[..., None, None]
    return (sums - earlier + continued).to(turns.dtype)


def rotated(x: Float[Tensor, "b l h e"], angles: Float[Tensor, "b l h a"]) -> Float[Tensor, "b l h e"]:
    """The first channels rotated, each pair of adjacent ones by an angle, and the others as they are."""
    turned, rest = torch.split(x, [2 * angles.shape[-1], x.shape[-1] - 2 * angles.shape[-1]], -1)
    even, odd = turned.unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    cosine, sine = angles.cos(), angles.sin()
    pairs = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return torch.cat([pairs.flatten(-2), rest], -1)
