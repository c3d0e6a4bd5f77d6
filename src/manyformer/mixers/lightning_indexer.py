"""The lightning indexer: a cheap score of every earlier token, by which a query chooses the tokens it attends to."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, TokenPositions
from manyformer.feedforward import init_glorot
from manyformer.ops.chosen_attention import choose_tokens, chosen_index_scores
from manyformer.position import Position
from manyformer.recompute import choose_once

KEY_NORM_EPS = 1e-6


class IndexQueries(NamedTuple):
    """The indexer's queries and the weights of its heads."""

    q: Float[Tensor, "b h l e"]
    head_weights: Float[Tensor, "b l h"]


@final
class LightningIndexer(nn.Module):
    """Chooses the `count` tokens with the largest scores for each query (DeepSeek-AI 2025, DeepSeek-V3.2-Exp, 2.1).

    The score of token s for query t is sum_h w_th ReLU(q_th k_s): `heads` queries from the latent of queries, one key
    of width `head_dim` for all heads, normalized, and head weights from the input, all in float32 at least. `position`
    acts on queries and keys. It is trained by `loss` alone, and what it reads has no gradient. Scores of all pairs are
    computed, so its time is quadratic in the length, with a small constant. Raises ValueError for a count, heads or a
    width below 1."""

    def __init__(
        self, dim: int, query_latent_dim: int, *, heads: int, head_dim: int, count: int, position: Position
    ) -> None:
        super().__init__()
        for name, size in {"heads": heads, "head_dim": head_dim, "count": count}.items():
            if size < 1:
                raise ValueError(f"LightningIndexer: {name} ({size}) must be at least 1")
        self.heads = heads
        self.head_dim = head_dim
        self.count = count
        self.position = position
        self.scale = (head_dim * heads) ** -0.5
        self.q_proj = nn.Linear(query_latent_dim, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, head_dim, bias=False)
        self.k_norm = nn.LayerNorm(head_dim, KEY_NORM_EPS)
        self.weight_proj = nn.Linear(dim, heads, bias=False)
        init_glorot(self.q_proj, self.k_proj, self.weight_proj)

    def keys(self, x: Float[Tensor, "b s d"], positions: TokenPositions) -> Float[Tensor, "b 1 s e"]:
        """The keys of tokens, which a cache holds."""
        k: Tensor = self.k_norm(self.k_proj(x.detach()))
        return self.position.key(k[:, None], positions)

    def queries(
        self, x: Float[Tensor, "b l d"], latent: Float[Tensor, "b l c"], positions: TokenPositions
    ) -> IndexQueries:
        """The queries of tokens, and the weights of heads with the scale of scores."""
        q = self.q_proj(latent.detach()).unflatten(-1, (self.heads, self.head_dim)).transpose(1, 2)
        head_weights = self.weight_proj(x.detach())
        dtype = torch.promote_types(q.dtype, torch.float32)
        return IndexQueries(self.position.query(q, positions).to(dtype), head_weights.to(dtype) * self.scale)

    def choose(
        self, queries: IndexQueries, keys: Float[Tensor, "b 1 s e"], visible: Bool[Tensor, "#b 1 l s"]
    ) -> Int[Tensor, "b l m"]:
        """The chosen ones among the visible tokens of each query, -1 for none."""

        @torch.no_grad()
        def choose() -> Tensor:
            return choose_tokens(*queries, keys[:, 0].to(queries.q.dtype), visible[:, 0], self.count)

        return choose_once(choose)

    def loss(
        self,
        queries: IndexQueries,
        keys: Float[Tensor, "b 1 s e"],
        chosen: Int[Tensor, "b l m"],
        shares: Float[Tensor, "b l m"],
        positions: TokenPositions,
    ) -> Float[Tensor, ""]:
        """The divergence KL(p | softmax of scores) over the chosen tokens, its mean over queries (2.1.1).

        p are the `shares` of tokens in the attention of all heads."""
        scores = chosen_index_scores(*queries, keys[:, 0].to(queries.q.dtype), chosen)
        is_scored = (chosen >= 0) & (positions.segment_ids != PADDING_SEGMENT)[..., None]
        # not infinity: rows without a token have no scores to normalize
        log_shares = scores.masked_fill(~is_scored, torch.finfo(scores.dtype).min).log_softmax(-1)
        divergence = torch.where(is_scored, torch.xlogy(shares, shares) - shares * log_shares, 0.0).sum()
        return divergence / is_scored.any(-1).sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"{self.count} tokens, {self.heads} heads"
