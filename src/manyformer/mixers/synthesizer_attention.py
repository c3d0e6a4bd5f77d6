"""Attention with synthesized scores, which need not compare query and key (Synthesizer)."""

from collections.abc import Sequence
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.attention import split_heads
from manyformer.core import Context, LayerOutput, State, TokenPositions
from manyformer.feedforward import init_glorot
from manyformer.head_selection import HeadSelection, select_head_inputs, select_head_outputs
from manyformer.masks import AllKeys, Mask
from manyformer.mixers.spatial_gate import apply_weights, dense_mask
from manyformer.mixers.synthesizer_scores import ScoreInputs, SynthesizerScores
from manyformer.multi_head.head_gates import MultiHeadLayer
from manyformer.ops.softmax_attention import masked_softmax
from manyformer.sources import SelfSource
from manyformer.sources.kv_source import CacheSpec, KVShape


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
        self.v_proj, self.out_proj, self.source = nn.Linear(dim, dim), nn.Linear(dim, dim), SelfSource()
        init_glorot(self.v_proj, self.out_proj)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        shape = KVShape(self.heads, sum(self.key_widths), self.v_proj.out_features // self.heads)
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
        keys = torch.split(inputs.k, self.key_widths, dim=-1)
        scores: list[Tensor] = [part(inputs._replace(k=part_keys)) for part, part_keys in zip(self.scores, keys)]
        if self.mixing_logits is None:
            return scores[0]
        weighted: list[Tensor] = [weight * part for weight, part in zip(self.mixing_logits.softmax(0), scores)]
        return sum(weighted[1:], weighted[0])

    def _project(self, x: Float[Tensor, "b s d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        k = torch.cat([part.project_key(x) for part in self.scores], dim=-1)  # type: ignore[operator]
        return k, split_heads(self.v_proj(x), self.heads)
