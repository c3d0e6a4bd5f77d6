"""Attention of each query to tokens that are chosen for it, the same for all heads, which share keys and values.

The keys and values of a query's tokens are gathered, for a chunk of queries at a time and again for the gradient: time
grows with the number of chosen pairs, memory with those of a chunk.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.ops.highest_scores import choose_highest_scores
from manyformer.ops.softmax_attention import masked_softmax
from manyformer.recompute import recompute_for_gradient

GATHERED_ELEMENTS = 1 << 22
"""Gathered numbers, or products of an index, that are held at a time."""


class TokenChoiceOutput(NamedTuple):
    """Outputs of all heads, and the mean over heads of the weight of each chosen token, without a gradient."""

    y: Float[Tensor, "b h l f"]
    shares: Float[Tensor, "b l m"]


def token_choice_mask(chosen: Int[Tensor, "b l m"], length: int) -> Bool[Tensor, "b 1 l s"]:
    """The definition: which of `length` keys each query sees."""
    hits = torch.zeros(*chosen.shape[:2], length + 1, dtype=torch.bool, device=chosen.device)
    return hits.scatter(-1, chosen.masked_fill(chosen < 0, length), 1)[:, None, :, :length]


def token_choice_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b s e"],
    v: Float[Tensor, "b s f"],
    chosen: Int[Tensor, "b l m"],
    *,
    scale: float,
) -> TokenChoiceOutput:
    """Softmax attention under `token_choice_mask`; zeros for queries without a chosen token."""
    size = _queries_of_chunk(k.shape[0] * chosen.shape[2] * (k.shape[2] + v.shape[2]))
    outputs = [
        recompute_for_gradient(_attend, q_chunk, k, v, chosen_chunk, scale, dropout=0.0)
        for q_chunk, chosen_chunk in zip(torch.split(q, size, 2), torch.split(chosen, size, 1))
    ]
    y, shares = zip(*outputs)
    return TokenChoiceOutput(torch.cat(y, 2), torch.cat(shares, 1))


def index_scores(
    q: Float[Tensor, "b h l e"], head_weights: Float[Tensor, "b l h"], k: Float[Tensor, "b s e"]
) -> Float[Tensor, "b l s"]:
    """The scores of all pairs: the positive parts of products, summed over heads with the weights of the query."""
    return (head_weights[..., None, :] @ (q.transpose(1, 2) @ k.mT[:, None]).relu()).squeeze(-2)


def choose_tokens(
    q: Float[Tensor, "b h l e"],
    head_weights: Float[Tensor, "b l h"],
    k: Float[Tensor, "b s e"],
    visible: Bool[Tensor, "#b l s"],
    count: int,
) -> Int[Tensor, "b l m"]:
    """The `count` visible tokens of each query with the largest `index_scores`, -1 for none."""
    size = _queries_of_chunk(q.shape[0] * q.shape[1] * k.shape[1])
    chunks = zip(torch.split(q, size, 2), torch.split(head_weights, size, 1), torch.split(visible, size, 1))
    chosen = [
        choose_highest_scores(index_scores(q_chunk, weights_chunk, k).masked_fill(~visible_chunk, -torch.inf), count)
        for q_chunk, weights_chunk, visible_chunk in chunks
    ]
    return torch.cat(chosen, 1)


def chosen_index_scores(
    q: Float[Tensor, "b h l e"],
    head_weights: Float[Tensor, "b l h"],
    k: Float[Tensor, "b s e"],
    chosen: Int[Tensor, "b l m"],
) -> Float[Tensor, "b l m"]:
    """`index_scores` of the chosen tokens, with a gradient; -inf where there is none."""
    size = _queries_of_chunk(k.shape[0] * chosen.shape[2] * k.shape[2])
    chunks = zip(torch.split(q, size, 2), torch.split(head_weights, size, 1), torch.split(chosen, size, 1))
    return torch.cat([recompute_for_gradient(_index_chosen, *chunk, k, dropout=0.0) for chunk in chunks], 1)


def gather_tokens(x: Float[Tensor, "b s e"], chosen: Int[Tensor, "b l m"]) -> Float[Tensor, "b l m e"]:
    """The vectors of the chosen tokens of each query; any vector in place of -1."""
    index = chosen.clamp(min=0).flatten(1)[..., None].expand(-1, -1, x.shape[-1])
    return x.gather(1, index).unflatten(1, chosen.shape[1:])  # type: ignore[no-untyped-call, no-any-return]


def _queries_of_chunk(elements: int) -> int:
    """The queries that are computed together, each of which takes so many elements."""
    return max(1, GATHERED_ELEMENTS // max(1, elements))


def _attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    by_query = q.transpose(1, 2)
    scores = by_query @ gather_tokens(k, chosen).mT * scale
    weights = masked_softmax(scores, (chosen >= 0)[..., None, :].expand_as(scores))
    y = weights.to(v.dtype) @ gather_tokens(v, chosen)
    return y.transpose(1, 2), weights.detach().mean(2)


def _index_chosen(q: Tensor, head_weights: Tensor, chosen: Tensor, k: Tensor) -> Tensor:
    products = (q.transpose(1, 2) @ gather_tokens(k, chosen).mT).relu()
    scores = (head_weights[..., None, :] @ products).squeeze(-2)
    return scores.masked_fill(chosen < 0, -torch.inf)
