"""Synthesizer attention: scores from the query alone, from positions alone, or from query-key products as usual."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.attention.attention import MultiHeadLayer, split_heads
from manyformer.nn.attention.kv_cache.kv_source import CacheSpec, KVShape, SelfSource
from manyformer.nn.core import Context, ContiguousLayout, LayerOutput, State, TokenPositions
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.masks import AllKeys, Mask
from manyformer.nn.ops.softmax_attention import masked_softmax
from manyformer.nn.runtime.head_selection import HeadSelection, PerHeadTensors, select_head_inputs, select_head_outputs
from manyformer.nn.token_mixing import PositionPairs, apply_weights, dense_mask, position_index


class ScoreInputs(NamedTuple):
    """What scores are computed from: the stream of the queries, the cached keys, and the positions of both."""

    x: Float[Tensor, "b l d"]
    k: Float[Tensor, "b h s e"]
    query_positions: TokenPositions
    key_positions: TokenPositions


class SynthesizerScores(PerHeadTensors, ABC):
    """Scores of all keys for each query, before the mask and the softmax."""

    key_width: int = 0
    """The width of the cached keys, per head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def project_key(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s e"]:
        """The keys to cache; of width 0 unless scores depend on the key's token."""
        # width 0: the cache then holds values alone, and only positions grow
        return x.new_empty(x.shape[0], self.heads, x.shape[1], 0)

    @abstractmethod
    def forward(self, inputs: ScoreInputs) -> Float[Tensor, "#b h l s"]: ...


@final
class FixedScores(SynthesizerScores):
    """Scores by pair of positions, independent of the tokens (Tay et al. 2021, section 3.2)."""

    def __init__(self, pairs: PositionPairs) -> None:
        super().__init__(pairs.heads)
        self.pairs = pairs

    def forward(self, inputs: ScoreInputs) -> Float[Tensor, "#b h l s"]:
        return self.pairs(inputs.query_positions, inputs.key_positions)


class QueryScores(SynthesizerScores):
    """Scores from the query alone: `columns` outputs of a two-layer perceptron per head, W2 relu(W1 x + b1) + b2."""

    head_axes = (("weight", -3), ("bias", -3))

    def __init__(self, dim: int, heads: int, max_length: int, columns: int) -> None:
        super().__init__(heads)
        self.max_length = max_length
        self.up = _linear(dim, dim)
        self.weight = nn.Parameter(torch.empty(heads, dim // heads, columns))
        self.bias = nn.Parameter(torch.zeros(heads, 1, columns))
        for weight in self.weight:
            nn.init.xavier_uniform_(weight.data)

    def keep_heads(self, selection: HeadSelection) -> None:
        super().keep_heads(selection)
        select_head_outputs(self.up, selection)

    def hidden(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l e"]:
        """relu(W1 x + b1), split into heads."""
        return split_heads(self.up(x).relu(), self.heads)


@final
class DenseScores(QueryScores):
    """One output for each key position (Tay et al. 2021, section 3.1)."""

    def __init__(self, dim: int, heads: int, max_length: int) -> None:
        super().__init__(dim, heads, max_length, max_length)

    def forward(self, inputs: ScoreInputs) -> Float[Tensor, "b h l s"]:
        hidden = self.hidden(inputs.x)
        key_positions = inputs.key_positions
        if isinstance(key_positions.layout, ContiguousLayout):
            index = position_index(key_positions, self.max_length)
            # only the columns of positions that occur, instead of all `max_length`
            return hidden @ self.weight[..., index] + self.bias[..., index]
        return gather_key_scores(hidden @ self.weight + self.bias, key_positions)


@final
class FactorizedDenseScores(QueryScores):
    """Products of two shorter vectors of outputs, indexed by the remainder and the quotient of a position.

    Tay et al. (2021), section 3.3: A has size `remainders`, B has size max_length / remainders, and position j has the
    score A[j mod remainders] B[j div remainders].
    """

    def __init__(self, dim: int, heads: int, max_length: int, *, remainders: int | None = None) -> None:
        if remainders is None:
            remainders = math.isqrt(max_length - 1) + 1
        quotients = -(-max_length // remainders)
        super().__init__(dim, heads, max_length, remainders + quotients)
        self.remainders = remainders
        self.quotients = quotients

    def forward(self, inputs: ScoreInputs) -> Float[Tensor, "b h l s"]:
        factors = self.hidden(inputs.x) @ self.weight + self.bias
        a, b = torch.split(factors, [self.remainders, self.quotients], dim=-1)
        # quotient first, so that entry j is A[j mod remainders] B[j div remainders]
        scores = (b[..., :, None] * a[..., None, :]).flatten(-2)
        index = position_index(inputs.key_positions, self.max_length)
        if isinstance(index, slice):
            return scores[..., index]
        return gather_key_scores(scores, inputs.key_positions)


@final
class DotProductScores(SynthesizerScores):
    """The scaled products of queries and keys, as in attention, for use in mixtures."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(heads)
        self.key_width = dim // heads
        self.q_proj = _linear(dim, dim)
        self.k_proj = _linear(dim, dim)

    def keep_heads(self, selection: HeadSelection) -> None:
        super().keep_heads(selection)
        select_head_outputs(self.q_proj, selection)
        select_head_outputs(self.k_proj, selection)

    def project_key(self, x: Float[Tensor, "b s d"]) -> Float[Tensor, "b h s e"]:
        return split_heads(self.k_proj(x), self.heads)

    def forward(self, inputs: ScoreInputs) -> Float[Tensor, "b h l s"]:
        return split_heads(self.q_proj(inputs.x), self.heads) @ inputs.k.mT / math.sqrt(self.key_width)


def gather_key_scores(scores: Float[Tensor, "b h l p"], key_positions: TokenPositions) -> Float[Tensor, "b h l s"]:
    """Gather the scores at the keys' positions from scores of all positions."""
    index = key_positions.position_ids[:, None, None].expand(-1, scores.shape[1], scores.shape[2], -1)
    return scores.gather(-1, index)


def _linear(dim: int, out_dim: int) -> nn.Linear:
    layer = nn.Linear(dim, out_dim)
    init_glorot(layer)
    return layer


@final
class SynthesizerAttention(MultiHeadLayer):
    """softmax(scores) v with `scores` that need not be products of queries and keys (Tay et al. 2021, section 3).

    Several scores are mixed with learned weights that add up to 1 (section 3.4). Values, heads and the output
    projection are those of attention. Positions count within each document. Raises ValueError if the scores have
    different numbers of heads, and for positions beyond their `max_length`.
    """

    def __init__(self, dim: int, scores: Sequence[SynthesizerScores], *, mask: Mask | None = None) -> None:
        super().__init__()
        self.heads = scores[0].heads
        if any(part.heads != self.heads for part in scores):
            raise ValueError(f"all scores must have the same number of heads, not {[part.heads for part in scores]}")
        if dim % self.heads:
            raise ValueError(f"dim ({dim}) must be a multiple of heads ({self.heads})")
        self.mask = AllKeys() if mask is None else mask
        self.scores = nn.ModuleList(scores)
        self.mixing_logits = nn.Parameter(torch.zeros(len(scores))) if len(scores) > 1 else None
        self.key_widths = [part.key_width for part in scores]
        self.value_dim = dim // self.heads
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)
        self.source = SelfSource()
        init_glorot(self.v_proj, self.out_proj)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        shape = KVShape(self.heads, sum(self.key_widths), self.value_dim)
        return self.source.init_state(CacheSpec(batch, shape, capacity, device, dtype))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        keys = self.source(x, ctx, self._project, state)
        mask = dense_mask(self.mask, ctx.positions, keys.positions, self.heads)
        weights = masked_softmax(self._scores(ScoreInputs(x, keys.k, ctx.positions, keys.positions)), mask)
        ctx.watch(self, "weights", weights)
        y = apply_weights(weights.to(keys.v.dtype), keys.v)
        return LayerOutput(self.out_proj(self.merge_heads(y)), keys.state, keys.loss)

    def select_projections(self, selection: HeadSelection) -> None:
        select_head_outputs(self.v_proj, selection)
        select_head_inputs(self.out_proj, selection)

    def extra_repr(self) -> str:
        return repr(self.mask)

    def _scores(self, inputs: ScoreInputs) -> Float[Tensor, "#b h l s"]:
        # each kind of scores has its part of the cached channels
        keys = torch.split(inputs.k, self.key_widths, dim=-1)
        scores: list[Tensor] = [part(inputs._replace(k=part_keys)) for part, part_keys in zip(self.scores, keys)]
        if self.mixing_logits is None:
            return scores[0]
        weighted: list[Tensor] = [weight * part for weight, part in zip(self.mixing_logits.softmax(0), scores)]
        return sum(weighted[1:], weighted[0])

    def _project(self, x: Float[Tensor, "b s d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        k = torch.cat([part.project_key(x) for part in self.scores], dim=-1)  # type: ignore[operator]
        return k, split_heads(self.v_proj(x), self.heads)
