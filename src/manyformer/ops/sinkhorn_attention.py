"""Blocks sorted by a matrix, and attention to them (Tay et al. 2020, Sparse Sinkhorn Attention, arXiv:2002.11296)."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.ops import small_batch_attention

HIDDEN = -1e30
"""Instead of -inf, which less -inf is no number."""

LEAST = 1e-9
"""A slot with less of a key than this has none."""


def balance(
    logits: Float[Tensor, "*b n n"], *, steps: int, causal: bool, valid: Bool[Tensor, "*#b n n"] | None = None
) -> Float[Tensor, "*b n n"]:
    """A matrix whose rows sum to 1, and with many steps its columns too: exp(logits), scaled by turns (section 3.1).

    What is not `valid` is 0, and so is a row with nothing valid. `causal`: no row takes of itself or of a later one,
    and a column is scaled, for each row, by its sum down to that row, so that later rows change nothing (section 3.3).
    Balanced in full, each row would then take all of the one before it: 1 over what it takes of others grows by 2 with
    every step, where there are two. Without any steps the rows alone are scaled, as in a softmax.
    """
    if causal:
        earlier = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(-1)
        valid = earlier if valid is None else valid & earlier

    def hidden(x: Tensor) -> Tensor:
        return x if valid is None else x.masked_fill(~valid, HIDDEN)

    x = hidden(logits)
    x = hidden(x - x.logsumexp(-1, keepdim=True))
    for _ in range(steps):
        x = hidden(x - (x.logcumsumexp(-2) if causal else x.logsumexp(-2, keepdim=True)))
        x = hidden(x - x.logsumexp(-1, keepdim=True))
    return x.exp()


def gumbel(x: Tensor) -> Tensor:
    """Noise whose addition to logits draws from their softmax (Gumbel 1954)."""
    return -torch.empty_like(x).exponential_().log()


def attend(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h m b"],
    *,
    causal: bool,
    scale: float,
    present: Bool[Tensor, "n b c"] | None = None,
) -> Float[Tensor, "n h m c f"]:
    """Each block of queries, which are those of the last blocks, sees its own block and what `sort` puts beside it.

    Keys and values of absent tokens are zeros. Where a slot is filled in part only, because an absent token was sorted
    there, it is a key of the rest that counts in part.
    """
    blocks, size, mask, bias = q.shape[2], q.shape[3], None, None
    if present is None:
        keys, values = (_paired(sort, x) for x in (k, v))
    else:
        keys, values, bias = _partially(sort, k, v, present)
    if causal:
        own = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        mask = torch.cat([own, torch.ones_like(own)], dim=1)
        if blocks == k.shape[2]:
            # the first block of all has none before it
            bias = torch.zeros(len(q), 1, blocks, 2 * size, dtype=q.dtype, device=q.device)
            bias[:, :, 0, size:] = -torch.inf
    bias = None if bias is None else _flat(bias)
    y = small_batch_attention.attend(_flat(q), _flat(keys), _flat(values), scale=scale, mask=mask, bias=bias)
    return y.view(len(q), blocks, *y.shape[1:]).transpose(1, 2)


def naive(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h m b"],
    *,
    causal: bool,
    scale: float,
) -> Float[Tensor, "n h m c f"]:
    """The definition without absent tokens: a softmax over what stands beside each block and what is in it."""
    size, ahead = q.shape[3], k.shape[2] - q.shape[2]
    ys = []
    for block in range(q.shape[2]):
        beside = [torch.einsum("nhb,nhbce->nhce", sort[:, :, block], x) for x in (k, v)]
        keys, values = (torch.cat([x, own[:, :, ahead + block]], 2) for x, own in zip(beside, (k, v)))
        scores = q[:, :, block] @ keys.mT * scale
        if causal:
            visible = torch.ones(size, 2 * size, dtype=torch.bool, device=q.device).tril(size)
            visible[:, :size] = ahead + block > 0
            scores = scores.masked_fill(~visible, -torch.inf)
        ys.append(scores.softmax(-1) @ values)
    return torch.stack(ys, dim=2)


def attend_cut(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h s b"],
    *,
    scale: float,
    present: Bool[Tensor, "n b c"] | None = None,
) -> Float[Tensor, "n h m c f"]:
    """SortCut: all queries see the first blocks of the sorted sequence and nothing else (section 3.4)."""
    bias = None
    if present is None:
        keys, values = (mixed(sort, x).flatten(2, 3) for x in (k, v))
    else:
        keys, values, bias = (x.flatten(2, 3) for x in partial(sort, k, v, present))
        # a line without any token must see something, whatever it is
        bias = bias.masked_fill((bias == -torch.inf).all(-1, keepdim=True), 0.0)[:, :, None]
    y = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=bias, scale=scale)
    return y.view(*q.shape[:4], v.shape[-1])


def _paired(sort: Float[Tensor, "n h m b"], x: Float[Tensor, "n h b c e"]) -> Float[Tensor, "n h m s e"]:
    """The last blocks, and beside each what it is given."""
    y: Tensor = _Paired.apply(sort.to(x.dtype), x)  # type: ignore[no-untyped-call]
    return y


class _Paired(torch.autograd.Function):
    """Both are written to where attention reads them, and blocks mixed from there."""

    @staticmethod
    def forward(ctx: Any, sort: Tensor, x: Tensor) -> Tensor:
        (rows, heads, blocks, size, width), queries = x.shape, sort.shape[2]
        y = x.new_empty(heads, rows, queries, 2, size, width)
        y[:, :, :, 0] = x[:, :, blocks - queries :].transpose(0, 1)
        own, beside = y.flatten(4).flatten(0, 1).unbind(2)
        every = own if queries == blocks else x.transpose(0, 1).reshape(heads * rows, blocks, -1)
        weights = sort.transpose(0, 1).flatten(0, 1)
        torch.bmm(weights, every, out=beside)
        ctx.save_for_backward(weights, every)
        return y.flatten(3, 4).transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor]:
        weights, every = ctx.saved_tensors
        rows, heads, queries, both, width = up.shape
        own, beside = up.transpose(0, 1).reshape(heads * rows, queries, 2, -1).unbind(2)
        to_sort, to_x = torch.bmm(beside, every.mT), torch.bmm(weights.mT, beside)
        to_x[:, -queries:] += own
        to_sort, to_x = (x.view(heads, rows, *x.shape[1:]).transpose(0, 1) for x in (to_sort, to_x))
        return to_sort, to_x.view(*to_x.shape[:3], both // 2, width)


def _partially(
    sort: Float[Tensor, "n h m b"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    present: Bool[Tensor, "n b c"],
) -> tuple[Float[Tensor, "n h m s e"], Float[Tensor, "n h m s f"], Float[Tensor, "n h m s"]]:
    """Keys and values of the last blocks and beside them what each is given, and what is added to their scores."""
    blocks = sort.shape[2]
    sorted_k, sorted_v, share = partial(sort, k, v, present)
    keys, values = (torch.cat([x[:, :, -blocks:], y], dim=3) for x, y in ((k, sorted_k), (v, sorted_v)))
    # a block without any token must see something, whatever it is
    seen = present | ~present.any(-1, keepdim=True)
    hidden = torch.zeros_like(seen, dtype=k.dtype).masked_fill(~seen, -torch.inf)[:, None, -blocks:]
    return keys, values, torch.cat([hidden.expand_as(share), share], dim=-1)


def mixed(sort: Float[Tensor, "n h m b"], x: Float[Tensor, "n h b c e"]) -> Float[Tensor, "n h m c e"]:
    """For each slot the sum of the blocks, weighted."""
    return (sort.to(x.dtype) @ x.flatten(3)).view(*sort.shape[:3], *x.shape[3:])


def partial(
    sort: Float[Tensor, "n h m b"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    present: Bool[Tensor, "n b c"],
) -> tuple[Float[Tensor, "n h m c e"], Float[Tensor, "n h m c f"], Float[Tensor, "n h m c"]]:
    """Keys and values of slots that may be filled in part, and the logarithm of that part, which takes no gradient."""
    share = sort.to(k.dtype) @ present[:, None].to(k.dtype)
    filled = share[..., None].clamp(min=LEAST)
    bias = share.detach().clamp(max=1.0)
    return mixed(sort, k) / filled, mixed(sort, v) / filled, bias.log().masked_fill(bias < LEAST, -torch.inf)


def _flat(x: Float[Tensor, "n h m *c"]) -> Float[Tensor, "nm h *c"]:
    """Each block as a row of its own."""
    return x.transpose(1, 2).flatten(0, 1)
