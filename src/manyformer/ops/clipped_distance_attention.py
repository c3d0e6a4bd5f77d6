"""Softmax attention with a term for each distance, where all distances beyond a limit have the same one.

Far keys then differ from ordinary attention by a number per query, which is the same as a shift of the log-sum-exp: a
fused causal call that begins later serves them. Only the band of near keys is written out. Extra memory is linear.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.ops import attention_with_lse
from manyformer.ops import band as bands
from manyformer.ops.band import DiagonalBand


class ClippedDistances(NamedTuple):
    """Row 0 of the terms is for keys `back` or more before their query, the last for `ahead` or more after it.

    Query i is at the place of key `offset` + i, which every query sees. A causal reach has `ahead` 0.
    """

    back: int
    ahead: int
    offset: int
    causal: bool


class FarKeys(NamedTuple):
    """Far keys before a query, or after it once both sequences are turned round: up to key i + `start` for query i."""

    start: int
    reversed: bool


def attend(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    terms: Float[Tensor, "#b #h #l r"],
    values: Float[Tensor, "#h r f"] | None,
    reach: ClippedDistances,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax of scale q_i k_j + terms[i, r_ij] over keys j, applied to v_j + values[r_ij]."""
    terms = terms.to(torch.promote_types(q.dtype, torch.float32))
    values = None if values is None else values.to(v.dtype)
    y: Tensor = _Clipped.apply(q, k, v, terms, values, reach, scale)  # type: ignore[no-untyped-call]
    return y


class _Clipped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Tensor,
        values: Tensor | None,
        reach: ClippedDistances,
        scale: float,
    ) -> Tensor:
        band, sides = _band(q, k, reach), _sides(q, k, reach)
        far = [_far(q, k, v, side, scale) for side in sides]
        shifted = [lse + terms[..., -side.reversed] for (_, lse), side in zip(far, sides)]
        near = bands.band_products(q * scale, k, band).to(terms.dtype) + terms[..., 1 : 1 + band.width]
        near.masked_fill_(~band.exists(q.device), -torch.inf)
        lse = torch.stack([near.logsumexp(-1), *shifted]).logsumexp(0)
        masses = [near.sub_(lse[..., None]).exp_(), *((one - lse).exp()[..., None] for one in shifted)]
        y = bands.band_weighted_sum(masses[0].to(v.dtype), v, band)
        for mass, (one, _) in zip(masses[1:], far):
            y = y + mass.to(v.dtype) * one
        if values is not None:
            y = y + _rows(masses).to(v.dtype) @ values
        # what flows into the term of a side can be told from its own output, or is what all others leave over
        ctx.save_for_backward(q, k, v, terms, values, y, lse, *masses, *(one for one, _ in far[1:]))
        ctx.band, ctx.sides, ctx.scale = band, sides, scale
        return y

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> Any:
        q, k, v, terms, values, y, lse, weights, *rest = ctx.saved_tensors
        band, sides, scale = ctx.band, ctx.sides, ctx.scale
        masses, ahead = [weights, *rest[: len(sides)]], rest[len(sides) :]
        slope = (up * y).sum(-1, keepdim=True)
        pull = bands.band_products(up, v, band)
        if values is not None:
            pull = pull + up @ values[:, 1 : 1 + band.width].mT
        change = weights * (pull - slope)
        narrow = change.to(q.dtype)
        to_q = bands.band_weighted_sum(narrow, k, band) * scale
        to_k = bands.band_weighted_sum_transposed(narrow, q * scale, band)
        to_v = bands.band_weighted_sum_transposed(weights.to(v.dtype), up, band)
        for side in sides:
            # the part of y that a far key would add to its own value is taken off, so that the slope is right
            own = y if values is None else y - values[:, -side.turned, None]
            shifted = lse - terms[..., -side.turned]
            _far_backward(up, q, k, v, own, shifted, side, scale, (to_q, to_k, to_v))
        to_terms = to_values = None
        if ctx.needs_input_grad[3]:
            ends = [_end(up, one, values, mass, slope) for one, mass in zip(ahead, masses[2:])]
            first = -change.sum(-1, keepdim=True) - sum(ends)
            to_terms = _rows([change, first, *ends]).sum_to_size(terms.shape)
        if values is not None and ctx.needs_input_grad[4]:
            each = torch.einsum("bhlr,bhlf->hrf", _rows(masses).to(up.dtype), up)
            to_values = each.sum_to_size(values.shape)
        return to_q, to_k, to_v, to_terms, to_values, None, None


def _end(up: Tensor, y: Tensor, values: Tensor | None, mass: Tensor, slope: Tensor) -> Float[Tensor, "b h l 1"]:
    """What flows into the term of the far keys ahead, whose own output is `y`."""
    whole = y if values is None else y + values[:, -1, None]
    return mass * ((up * whole).sum(-1, keepdim=True) - slope)


def _rows(parts: list[Tensor]) -> Float[Tensor, "b h l r"]:
    """Near keys, far keys before and far keys after (if any) in the order of the terms' rows."""
    near, before, *after = parts
    return torch.cat([before, near, *after], dim=-1)


def _band(q: Tensor, k: Tensor, reach: ClippedDistances) -> DiagonalBand:
    width = reach.back + (0 if reach.causal else reach.ahead - 1)
    return DiagonalBand(reach.offset - reach.back + 1, width, q.shape[2], k.shape[2])


def _sides(q: Tensor, k: Tensor, reach: ClippedDistances) -> list[FarKeys]:
    before = FarKeys(reach.offset - reach.back, reversed=False)
    if reach.causal:
        return [before]
    return [before, FarKeys(k.shape[2] - q.shape[2] - reach.offset - reach.ahead, reversed=True)]


def _calls(length: int, start: int) -> Iterator[tuple[slice, slice, bool]]:
    """Rows, keys and whether they are causal, of calls that together let query i see the keys up to i + `start`."""
    if start > 0:
        yield slice(0, length), slice(0, start), False
    if length + start > 0:
        yield slice(max(0, -start), length), slice(max(0, start), length + start), True


def _far(q: Tensor, k: Tensor, v: Tensor, side: FarKeys, scale: float) -> tuple[Tensor, Tensor]:
    """Outputs and log-sum-exps of the far keys alone; a query that has none gets 0 and -inf."""
    if side.reversed:
        y, lse = _far(q.flip(2), k.flip(2), v.flip(2), side._replace(reversed=False), scale)
        return y.flip(2), lse.flip(2)
    wide = torch.promote_types(q.dtype, torch.float32)
    y = q.new_zeros(*q.shape[:3], v.shape[-1])
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    for rows, keys, causal in _calls(q.shape[2], side.start):
        one, its = attention_with_lse.attention_forward(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], scale=scale, causal=causal
        )
        attention_with_lse.merge_lse(y[:, :, rows], lse[:, :, rows], one, its)
    return y, lse


def _far_backward(
    up: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    side: FarKeys,
    scale: float,
    sums: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients of the far keys of one side to `sums`."""
    up, q, k, v, y, lse = (x.flip(2) if side.reversed else x for x in (up, q, k, v, y, lse))
    for rows, keys, causal in _calls(q.shape[2], side.start):
        ups, ys, qs = (x[:, :, rows] for x in (up, y, q))
        found = attention_with_lse.attention_backward(
            ups, qs, k[:, :, keys], v[:, :, keys], ys, lse[:, :, rows], scale=scale, causal=causal
        )
        for total, one, where in zip(sums, found, (rows, keys, keys)):
            length = total.shape[2]
            place = slice(length - where.stop, length - where.start) if side.reversed else where
            total[:, :, place] += one.flip(2) if side.reversed else one
