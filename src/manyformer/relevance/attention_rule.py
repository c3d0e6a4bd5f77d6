"""The rule of relevance for softmax attention: the whole local Jacobian for queries, keys and values of each head."""

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.relevance.propagation_rules import EPSILON, MAX_IMPACTS, rescaled


def attention_relevance(
    relevance: Float[Tensor, "t b h l f"],
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    bias: Float[Tensor, "#b #h l s"] | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The relevance of queries, keys and values of softmax(q k^T scale + bias) v; a sample is one head of one row.

    The impacts of the values are a[l, s] v[s, f], those of the keys a[l, s] (v[s, f] - y[l, f]) q[l, e] k[s, e] scale,
    and those of the queries their sums over s, with weights a and outputs y. The impacts of the keys are products of a
    part without e and a part without f, so that sums of their positive and negative parts need no Jacobian. A few
    queries are processed at a time: memory is linear in the number of keys. Rows without a visible key get nothing."""
    totals = [relevance.new_zeros(relevance.shape[0], *x.shape) for x in (q, k, v)]
    elements_per_query = k.shape[2] * v.shape[3] * q.shape[0] * q.shape[1]
    size = max(1, MAX_IMPACTS // max(1, elements_per_query))
    for start in range(0, q.shape[2], size):
        queries = slice(start, start + size)
        part_bias = bias if bias is None else bias[:, :, queries]
        parts = _query_relevance(relevance[:, :, :, queries], q[:, :, queries], k, v, part_bias, scale)
        totals[0][:, :, :, queries] = parts[0]
        totals[1] += parts[1]
        totals[2] += parts[2]
    q_relevance, k_relevance, v_relevance = _rescaled_heads(totals, relevance)
    return q_relevance, k_relevance, v_relevance


def _query_relevance(
    relevance: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The unscaled relevance that comes from these queries alone."""
    scores = q @ k.mT * scale
    weights = (scores if bias is None else scores + bias).softmax(-1).nan_to_num(0.0)
    deviations = v[:, :, None] - (weights @ v)[:, :, :, None]
    # a (v - y), split by sign: (b h l s f)
    effects = weights[..., None] * deviations
    effects_above = effects.clamp(min=0)
    effects_below = effects.clamp(max=0)
    (q_above, q_below), (k_above, k_below) = ((x.clamp(min=0), x.clamp(max=0)) for x in (q, k))
    # the sums over e of the positive and of the negative products q k scale: (b h l s)
    products_above = (q_above @ k_above.mT + q_below @ k_below.mT) * scale
    products_below = (q_above @ k_below.mT + q_below @ k_above.mT) * scale
    query_impacts = q[..., None, :] * torch.einsum("bhlsf,bhse->bhlfe", effects, k) * scale
    queries_above = query_impacts.clamp(min=0)
    queries_below = query_impacts.clamp(max=0)
    sums = []
    for sign, first, second, query_part in (
        (1, products_above, products_below, queries_above),
        (-1, products_below, products_above, queries_below),
    ):
        key_sum = torch.einsum("bhlsf,bhls->bhlf", effects_above, first)
        key_sum += torch.einsum("bhlsf,bhls->bhlf", effects_below, second)
        value_sum = weights @ (v.clamp(min=0) if sign > 0 else v.clamp(max=0))
        sums.append(key_sum + value_sum + query_part.sum(-1) + sign * EPSILON)
    above, below = (relevance / total / 2 for total in sums)
    q_relevance = torch.einsum("tbhlf,bhlfe->tbhle", above, queries_above)
    q_relevance += torch.einsum("tbhlf,bhlfe->tbhle", below, queries_below)
    # for keys, positive products q k meet positive effects in the positive part, and negative ones in the negative part
    with_above = torch.einsum("tbhlf,bhlsf->tbhls", above, effects_above)
    with_above += torch.einsum("tbhlf,bhlsf->tbhls", below, effects_below)
    with_below = torch.einsum("tbhlf,bhlsf->tbhls", above, effects_below)
    with_below += torch.einsum("tbhlf,bhlsf->tbhls", below, effects_above)
    same_sign = k_above * (with_above.mT @ q_above) + k_below * (with_above.mT @ q_below)
    other_sign = k_below * (with_below.mT @ q_above) + k_above * (with_below.mT @ q_below)
    v_relevance = v.clamp(min=0) * (weights.mT @ above) + v.clamp(max=0) * (weights.mT @ below)
    return q_relevance, (same_sign + other_sign) * scale, v_relevance


def _rescaled_heads(relevances: list[Tensor], reference: Tensor) -> list[Tensor]:
    """Relevances with the sum of absolute values of `reference` in each head of each row."""
    return rescaled(relevances, reference, 2)
