"""Softmax attention with forget gates: the weight of a key decays by the gates of all tokens after it."""

import math
from typing import Literal, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, TokenPositions, no_watch
from manyformer.costs.cost_model import COSTS
from manyformer.head_projection import HeadProjection
from manyformer.kernels.kernel import Kernel, KernelCall
from manyformer.masks import Causal
from manyformer.ops import softmax_attention as ops

ForgettingPath = Literal["naive", "fused"]

BLOCK = COSTS.forget_gate_block
"""Queries of one fused call: the sums of its gates are counted from its first token, so that float32 stays exact."""

LOW_PRECISION_PARTS = 3
"""Channels that hold a sum of gates in 16 bits each: together they have the digits of float32."""

MAX_LOW_PRECISION = 1e4
"""Sums beyond it, whose weights are zero, are clamped to what float16 can represent."""


@final
class ForgettingKernel(Kernel):
    """Causal softmax attention with a forget gate for each token and key head (Lin et al. 2025, arXiv:2503.02130).

    Section 3: the score of key j for query i is q_i k_j / sqrt(e) plus the sum of log f over the tokens from j + 1 to
    i, with f = sigmoid(w x + b); b begins at 0. Gates that are all exp(-slope) are the biases of ALiBi. `path` forces
    the definition ("naive"), which forms all pairs, or torch's fused kernel, to which the sums are another channel of
    the keys ("fused"). Raises ValueError for queries that are not the last of the keys.
    """

    supports = frozenset({"query", "key"})
    gate_dim = 1
    cache_mask = Causal()

    def __init__(self, dim: int, kv_heads: int, *, path: Literal["auto"] | ForgettingPath = "auto") -> None:
        super().__init__()
        if path != "auto" and path not in get_args(ForgettingPath):
            choices = ", ".join(get_args(ForgettingPath))
            raise ValueError(f"ForgettingKernel: path '{path}' does not exist; choose from auto, {choices}")
        self.path, self.forget_gate = path, HeadProjection(dim, kv_heads, 1, bias=True)

    @property
    def gate_projection(self) -> nn.Module | None:
        return self.forget_gate

    def forward(self, call: KernelCall) -> LayerOutput:
        if call.q.shape[2] > call.k.shape[2]:
            raise ValueError(
                f"ForgettingKernel counts gates from key to query, so it needs a key for each query, got "
                f"{call.k.shape[2]} keys, {call.q.shape[2]} queries"
            )
        v, gates = torch.split(call.v, [call.v.shape[-1] - 1, 1], -1)
        totals = total_log_gates(gates[..., 0], call.key_positions)
        q = call.q / math.sqrt(call.q.shape[-1])
        if self._select_path(call) == "fused":
            return LayerOutput(_fused(call._replace(q=q, v=v), totals), call.state)
        k, v, totals = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (call.k, v, totals))
        decays = (totals[..., -q.shape[2] :, None] - totals[..., None, :]).to(
            torch.promote_types(q.dtype, torch.float32)
        )
        weights = ops.masked_softmax(q @ k.mT + decays, Causal().dense(call.query_positions, call.key_positions, 1))
        call.watch(self, "weights", weights.to(q.dtype))
        return LayerOutput(weights.to(q.dtype) @ v, call.state)

    def explain(self, call: KernelCall) -> str:
        if self._select_path(call) == "naive":
            return "naive: " + ("forced" if self.path != "auto" else "the weights are watched")
        return f"fused: blocks of {BLOCK} queries, the sums of gates as a channel of the keys"

    def extra_repr(self) -> str:
        return f"path={self.path}"

    def _select_path(self, call: KernelCall) -> ForgettingPath:
        if self.path == "fused" and call.watch is not no_watch:
            raise ValueError("ForgettingKernel: path 'fused' cannot serve this call: its weights are watched")
        return "fused" if self.path == "fused" or (self.path == "auto" and call.watch is no_watch) else "naive"


def total_log_gates(gates: Float[Tensor, "b g s"], positions: TokenPositions) -> Float[Tensor, "b g s"]:
    """The sums of log sigmoid(gate) from the first column on, in float64, so that their differences are exact.

    Padding has the gate 1. Tokens of a document are adjacent but for padding, so no difference within one contains the
    gates of another."""
    log_gates = F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
    if not isinstance(positions.layout, ContiguousLayout):
        log_gates = log_gates.masked_fill((positions.segment_ids == PADDING_SEGMENT)[:, None], 0.0)
    return log_gates.double().cumsum(-1)


def _fused(call: KernelCall, totals: Float[Tensor, "b g s"]) -> Float[Tensor, "b h l f"]:
    """Attention by torch's fused kernel, for scaled queries; a row's own sum of gates cancels in its softmax."""
    q, k, v, query_positions, key_positions, *_ = call
    is_contiguous = all(isinstance(x.layout, ContiguousLayout) for x in (query_positions, key_positions))
    first, outputs = k.shape[2] - q.shape[2], []
    for start in range(0, q.shape[2], BLOCK):
        queries = q[:, :, start : start + BLOCK]
        # the queries are the last keys, so no query of the block attends to keys behind it
        stop = first + start + queries.shape[2]
        # a later token would be the more exact middle, but its rounding would reach queries before it
        origin = totals[..., first + start, None].detach()
        channels = _split_precision(origin - totals[..., :stop], q.dtype)
        keys = torch.cat([k[:, :, :stop], channels], -1)
        queries = torch.cat([queries, queries.new_ones(*queries.shape[:3], channels.shape[-1])], -1)
        aligned = is_contiguous and stop == queries.shape[2]
        positions = query_positions.columns(start, start + BLOCK), key_positions.columns(0, stop)
        mask = None if aligned or (is_contiguous and queries.shape[2] == 1) else Causal().dense(*positions, 1)
        outputs.append(ops.fused_attention(queries, keys, v[:, :, :stop], mask, causal=aligned, scale=1.0))
    return torch.cat(outputs, 2)


def _split_precision(x: Float[Tensor, "b g s"], dtype: torch.dtype) -> Float[Tensor, "b g s n"]:
    """`x` as channels of `dtype` whose sum is `x` to the digits of float32: one, or several of 16 bits."""
    if torch.promote_types(dtype, torch.float32) == dtype:
        return x.to(dtype)[..., None]
    remainder, parts = x.clamp(-MAX_LOW_PRECISION, MAX_LOW_PRECISION), []
    for _ in range(LOW_PRECISION_PARTS):
        parts.append(remainder.to(dtype))
        remainder = remainder - parts[-1].double()
    return torch.stack(parts, -1)
