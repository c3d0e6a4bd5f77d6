"""Softmax attention with forget gates: the weight of a key decays by the gates of all tokens after it."""

import math
from typing import Literal, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import PADDING_SEGMENT, ContiguousLayout, LayerOutput, TokenPositions, no_watch
from manyformer.nn.kernels.kernel import Kernel, KernelCall
from manyformer.nn.masks.local import Causal
from manyformer.nn.ops import softmax_attention as ops
from manyformer.nn.runtime.devices import float64_device
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.nn.runtime.torch_internals import is_of_any_size, is_traced, refuse_any_size

ForgettingPath = Literal["naive", "fused"]

BLOCK = 128
"""Queries of one fused call."""

ORIGINS = 8
"""Parts of the queries of a fused call, each with a channel of its own for sums of gates that begin at its first token:
scores contain these sums, and float32 rounds them the less the smaller they are."""

MAX_SUM = 16.0
"""The largest sum of the gates of a part of queries, of which float32 resolves 1e-6, that a fused call adds to scores.
Beyond it pairs get the exact difference of their sums, in blocks of the definition."""

LOW_PRECISION_PARTS = 3
"""Channels that hold a sum of gates in 16 bits each: together they have the digits of float32. Queries of 16 bits have
fewer, so that one origin serves all of a fused call."""

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
        self.path = path
        self.forget_gate = HeadProjection(dim, kv_heads, 1, bias=True)

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
        call = call._replace(q=q, v=v)
        if self._select_path(call) == "fused":
            if _has_strong_gates(totals, q):
                attend = _dense_blocks
            else:
                attend = _fused
            return LayerOutput(attend(call, totals), call.state)
        y, weights = _dense(call, totals)
        call.watch(self, "weights", weights)
        return LayerOutput(y, call.state)

    def explain(self, call: KernelCall) -> str:
        if self._select_path(call) == "naive":
            return "naive: " + (
                "forced" if self.path != "auto" else "the weights are watched, or a graph is for any length"
            )
        return f"fused: blocks of {BLOCK} queries, the sums of gates as channels of the keys"

    def extra_repr(self) -> str:
        return f"path={self.path}"

    def _select_path(self, call: KernelCall) -> ForgettingPath:
        if self.path == "fused":
            if call.watch is not no_watch:
                raise ValueError("ForgettingKernel: path 'fused' cannot serve this call: its weights are watched")
            refuse_any_size(call.q.shape[2], "ForgettingKernel: path 'fused' is a loop over blocks of queries")
            return "fused"
        # an exported graph of any length has no loop over blocks
        if self.path == "auto" and call.watch is no_watch and not is_of_any_size(call.q.shape[2]):
            return "fused"
        return "naive"


def total_log_gates(gates: Float[Tensor, "b g s"], positions: TokenPositions) -> Float[Tensor, "b g s"]:
    """The sums of log sigmoid(gate) from the first column on, in float64, so that their differences are exact: on the
    CPU, like whatever is computed from them in float64, where the device has no float64.

    Padding has the gate 1. Tokens of a document are adjacent but for padding, so no difference within one contains the
    gates of another."""
    log_gates = F.logsigmoid(gates.to(torch.promote_types(gates.dtype, torch.float32)))
    if not isinstance(positions.layout, ContiguousLayout):
        log_gates = log_gates.masked_fill((positions.segment_ids == PADDING_SEGMENT)[:, None], 0.0)
    return log_gates.to(float64_device(gates.device)).double().cumsum(-1)


def _dense(call: KernelCall, totals: Float[Tensor, "b g s"]) -> tuple[Float[Tensor, "b h l f"], Tensor]:
    """Outputs and weights by the definition, for scaled queries that are the last of the keys."""
    q = call.q
    k, v, totals = (x.repeat_interleave(call.q.shape[1] // x.shape[1], 1) for x in (call.k, call.v, totals))
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    # the difference first, in float64: the sums of a long row have no digits left for single gates in float32
    decays = (totals[..., -q.shape[2] :, None] - totals[..., None, :]).to(compute_dtype).to(q.device)
    mask = Causal().dense(call.query_positions, call.key_positions, 1)
    weights = ops.masked_softmax(q @ k.mT + decays, mask).to(q.dtype)
    return weights @ v, weights


def _dense_blocks(call: KernelCall, totals: Float[Tensor, "b g s"]) -> Float[Tensor, "b h l f"]:
    """The definition for `BLOCK` queries at a time, without their weights."""
    first = call.k.shape[2] - call.q.shape[2]
    outputs = []
    for start in range(0, call.q.shape[2], BLOCK):
        queries = call.q[:, :, start : start + BLOCK]
        stop = first + start + queries.shape[2]
        block = call._replace(
            q=queries,
            k=call.k[:, :, :stop],
            v=call.v[:, :, :stop],
            query_positions=call.query_positions.columns(start, start + BLOCK),
            key_positions=call.key_positions.columns(0, stop),
        )
        outputs.append(_dense(block, totals[..., :stop])[0])
    return torch.cat(outputs, 2)


def _part_size(dtype: torch.dtype) -> int:
    """The queries of a fused call that share an origin of sums."""
    if torch.finfo(dtype).bits < 32:
        return BLOCK
    return max(BLOCK // ORIGINS, 1)


def _has_strong_gates(totals: Float[Tensor, "b g s"], q: Float[Tensor, "b h l e"]) -> bool:
    """Whether the gates of some part of the queries sum to more than a score may contain."""
    size = _part_size(q.dtype)
    # 16 bits resolve no more, compiled code must not depend on values, and `meta` tensors have none
    if size == BLOCK or q.shape[2] == 1 or is_traced() or q.is_meta:
        return False
    sums = totals[..., -q.shape[2] :].detach()
    # repeating the last sum adds no gate to the last part
    padded = F.pad(sums, (0, -q.shape[2] % size), mode="replicate")
    parts = padded.unflatten(-1, (-1, size))  # type: ignore[no-untyped-call]
    return bool((parts[..., 0] - parts[..., -1]).amax() > MAX_SUM)


def _fused(call: KernelCall, totals: Float[Tensor, "b g s"]) -> Float[Tensor, "b h l f"]:
    """Attention by torch's fused kernel, for scaled queries; a row's own sum of gates cancels in its softmax."""
    q, k, v, query_positions, key_positions, *_ = call
    is_contiguous = all(isinstance(x.layout, ContiguousLayout) for x in (query_positions, key_positions))
    first = k.shape[2] - q.shape[2]
    size = _part_size(q.dtype)
    outputs = []
    for start in range(0, q.shape[2], BLOCK):
        queries = q[:, :, start : start + BLOCK]
        # the queries are the last keys, so no query of the block attends to keys behind it
        stop = first + start + queries.shape[2]
        # later tokens would be more exact middles, but their rounding would reach queries before them
        origins = totals[..., None, first + start : stop : size].detach()
        channels = _split_precision(origins - totals[..., :stop, None], q.dtype).to(q.device)
        part = torch.arange(queries.shape[2], device=q.device) // size
        # a query has a 1 in the channels of its own origin, and so adds the sums of gates from there to its scores
        chosen = part[:, None] == torch.arange(channels.shape[-1], device=q.device) % origins.shape[-1]
        keys = torch.cat([k[:, :, :stop], channels], -1)
        queries = torch.cat([queries, chosen.to(q.dtype).expand(*queries.shape[:2], -1, -1)], -1)
        aligned = bool(is_contiguous and stop == queries.shape[2])
        positions = query_positions.columns(start, start + BLOCK), key_positions.columns(0, stop)
        if aligned or (is_contiguous and queries.shape[2] == 1):
            mask = None
        else:
            mask = Causal().dense(*positions, 1)
        outputs.append(ops.fused_attention(queries, keys, v[:, :, :stop], mask, causal=aligned, scale=1.0))
    return torch.cat(outputs, 2)


def _split_precision(x: Float[Tensor, "b g s n"], dtype: torch.dtype) -> Float[Tensor, "b g s m"]:
    """`x` as channels of `dtype` whose sums are `x` to the digits of float32: one each, or several of 16 bits."""
    if torch.promote_types(dtype, torch.float32) == dtype:
        return x.to(dtype)
    # each channel holds what the ones before it have rounded away
    remainder = x.clamp(-MAX_LOW_PRECISION, MAX_LOW_PRECISION)
    parts = []
    for _ in range(LOW_PRECISION_PARTS):
        parts.append(remainder.to(dtype))
        remainder = remainder - parts[-1].double()
    return torch.cat(parts, -1)
