"""Softmax attention with a term for each distance, where all distances beyond a limit have the same one.

Far keys then differ from ordinary attention by one number per query, which shifts the log-sum-exp: they are computed by
a fused causal call with an offset. Only the band of near keys is written out. Extra memory is linear in length.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.nn.ops import attention_with_lse
from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.softmax import band as bands
from manyformer.nn.softmax.band import DiagonalBand


class ClippedDistances(NamedTuple):
    """Limits of the distance terms: row 0 is for keys at least `back` before the query, the last for `ahead` after it.

    Query i is at the position of key `offset` + i, which every query sees. `ahead` is 0 if `causal`.
    """

    back: int
    ahead: int
    offset: int
    causal: bool


class FarKeys(NamedTuple):
    """Far keys of query i, up to key i + `start`: those behind it, or ahead of it if both sequences are `reversed`."""

    start: int
    reversed: bool


def clipped_distance_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    terms: Float[Tensor, "#b #h #l r"],
    values: Float[Tensor, "#h r f"] | None,
    distances: ClippedDistances,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + terms[i, r_ij] over keys j, applied to v_j + values[r_ij]."""
    terms = terms.to(torch.promote_types(q.dtype, torch.float32))
    values = None if values is None else values.to(v.dtype)
    y: Tensor = _ClippedDistanceAttention.call(q, k, v, terms, values, distances, scale)
    return y


class _ClippedDistanceAttention(HandwrittenGradient):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Tensor,
        values: Tensor | None,
        distances: ClippedDistances,
        scale: float,
    ) -> Tensor:
        # near keys have terms of their own and are computed in a band; far keys share one term, which shifts the log-
        # sum-exp of an ordinary attention to them
        band = _band(q, k, distances)
        sides = _far_sides(q, k, distances)
        far_results = [_far_attention(q, k, v, side, scale) for side in sides]
        shifted_lses = [lse + terms[..., -side.reversed] for (_, lse), side in zip(far_results, sides)]
        near_scores = bands.band_products(q * scale, k, band).to(terms.dtype) + terms[..., 1 : 1 + band.width]
        near_scores.masked_fill_(~band.valid_keys(q.device), -torch.inf)
        # over all keys: the share of each side in a query's weights follows from it
        lse = torch.stack([near_scores.logsumexp(-1), *shifted_lses]).logsumexp(0)
        far_masses = ((far_lse - lse).exp()[..., None] for far_lse in shifted_lses)
        masses = [near_scores.sub_(lse[..., None]).exp_(), *far_masses]
        y = bands.band_weighted_sum(masses[0].to(v.dtype), v, band)
        for mass, (far_y, _) in zip(masses[1:], far_results):
            y = y + mass.to(v.dtype) * far_y
        if values is not None:
            y = y + _join_rows(masses).to(v.dtype) @ values
        # the gradient of a side's term follows from that side's output, or is minus the sum of all others
        ctx.save_for_backward(q, k, v, terms, values, y, lse, *masses, *(far_y for far_y, _ in far_results[1:]))
        ctx.band = band
        ctx.sides = sides
        ctx.scale = scale
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        q, k, v, terms, values, y, lse, weights, *saved = ctx.saved_tensors
        band = ctx.band
        sides = ctx.sides
        scale = ctx.scale
        masses = [weights, *saved[: len(sides)]]
        far_ys = saved[len(sides) :]
        delta = (grad_y * y).sum(-1, keepdim=True)
        grad_weights = bands.band_products(grad_y, v, band)
        if values is not None:
            grad_weights = grad_weights + grad_y @ values[:, 1 : 1 + band.width].mT
        grad_scores = weights * (grad_weights - delta)
        cast_scores = grad_scores.to(q.dtype)
        grad_q = bands.band_weighted_sum(cast_scores, k, band) * scale
        grad_k = bands.band_weighted_sum_transposed(cast_scores, q * scale, band)
        grad_v = bands.band_weighted_sum_transposed(weights.to(v.dtype), grad_y, band)
        for side in sides:
            # the term's value vector is part of every far key's value: subtracted, so that delta is right
            if values is None:
                side_y = y
            else:
                side_y = y - values[:, -side.reversed, None]
            side_lse = lse - terms[..., -side.reversed]
            _far_backward(grad_y, q, k, v, side_y, side_lse, side, scale, (grad_q, grad_k, grad_v))
        grad_terms = grad_values = None
        if ctx.needs_input_grad[3]:
            grad_far_terms = [
                _far_term_gradient(grad_y, far_y, values, mass, delta) for far_y, mass in zip(far_ys, masses[2:])
            ]
            # gradients of the scores of a softmax sum to 0 over all keys, and therefore over all terms
            grad_first_term = -grad_scores.sum(-1, keepdim=True) - sum(grad_far_terms)
            grad_terms = _join_rows([grad_scores, grad_first_term, *grad_far_terms]).sum_to_size(terms.shape)
        if values is not None and ctx.needs_input_grad[4]:
            value_products = torch.einsum("bhlr,bhlf->hrf", _join_rows(masses).to(grad_y.dtype), grad_y)
            grad_values = value_products.sum_to_size(values.shape)
        return grad_q, grad_k, grad_v, grad_terms, grad_values, None, None


def _far_term_gradient(
    grad_y: Tensor, y: Tensor, values: Tensor | None, mass: Tensor, delta: Tensor
) -> Float[Tensor, "b h l 1"]:
    """Gradient of the term of the far keys ahead, attention to which alone gives `y`."""
    total_y = y if values is None else y + values[:, -1, None]
    return mass * ((grad_y * total_y).sum(-1, keepdim=True) - delta)


def _join_rows(parts: list[Tensor]) -> Float[Tensor, "b h l r"]:
    """Columns for near keys, far keys behind and far keys ahead (if any), in the order of the terms' rows."""
    near_keys, behind, *ahead = parts
    return torch.cat([behind, near_keys, *ahead], dim=-1)


def _band(q: Tensor, k: Tensor, distances: ClippedDistances) -> DiagonalBand:
    # distances strictly between the two clipped ends
    width = distances.back + (0 if distances.causal else distances.ahead - 1)
    return DiagonalBand(distances.offset - distances.back + 1, width, q.shape[2], k.shape[2])


def _far_sides(q: Tensor, k: Tensor, distances: ClippedDistances) -> list[FarKeys]:
    behind = FarKeys(distances.offset - distances.back, reversed=False)
    if distances.causal:
        return [behind]
    return [behind, FarKeys(k.shape[2] - q.shape[2] - distances.offset - distances.ahead, reversed=True)]


def _visible_ranges(length: int, start: int) -> Iterator[tuple[slice, slice, bool]]:
    """Query slice, key slice and causality of the calls that together show query i the keys up to i + `start`."""
    # the first `start` keys are seen by every query; of those after them each query sees one more than the one before
    # it
    if start > 0:
        yield slice(0, length), slice(0, start), False
    if length + start > 0:
        yield slice(max(0, -start), length), slice(max(0, start), length + start), True


def _far_attention(q: Tensor, k: Tensor, v: Tensor, side: FarKeys, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps over the far keys alone; 0 and -inf for a query without any."""
    if side.reversed:
        y, lse = _far_attention(q.flip(2), k.flip(2), v.flip(2), side._replace(reversed=False), scale)
        return y.flip(2), lse.flip(2)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    y = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = torch.full(q.shape[:3], -torch.inf, dtype=compute_dtype, device=q.device)
    for rows, keys, causal in _visible_ranges(q.shape[2], side.start):
        range_y, range_lse = attention_with_lse.attention_forward(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], scale=scale, causal=causal
        )
        attention_with_lse.merge_lse(y[:, :, rows], lse[:, :, rows], range_y, range_lse)
    return y, lse


def _far_backward(
    grad_y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    side: FarKeys,
    scale: float,
    totals: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of q, k and v from the far keys of one side to `totals`."""
    grad_y, q, k, v, y, lse = (x.flip(2) if side.reversed else x for x in (grad_y, q, k, v, y, lse))
    for rows, keys, causal in _visible_ranges(q.shape[2], side.start):
        grad_ys, ys, qs = (x[:, :, rows] for x in (grad_y, y, q))
        range_grads = attention_with_lse.attention_backward(
            grad_ys, qs, k[:, :, keys], v[:, :, keys], ys, lse[:, :, rows], scale=scale, causal=causal
        )
        for total, grad, token_range in zip(totals, range_grads, (rows, keys, keys)):
            length = total.shape[2]
            if side.reversed:
                target = slice(length - token_range.stop, length - token_range.start)
            else:
                target = token_range
            total[:, :, target] += grad.flip(2) if side.reversed else grad
