"""Blocks sorted by a matrix, and attention to them (Tay et al. 2020, Sparse Sinkhorn Attention, arXiv:2002.11296)."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.ops import small_batch_attention

MASK_BIAS = -1e30
"""Finite stand-in for -inf: -inf minus -inf is nan."""

MIN_SHARE = 1e-9
"""A slot whose total share of keys is below this is empty."""


def balance(
    logits: Float[Tensor, "*b n n"], *, steps: int, causal: bool, valid: Bool[Tensor, "*#b n n"] | None = None
) -> Float[Tensor, "*b n n"]:
    """Sinkhorn normalization of exp(logits): rows sum to 1 and, with many steps, columns too (section 3.1).

    Entries that are not `valid` are 0, and so are rows without a valid one. `causal`: a row has weight on earlier
    blocks alone, and for each row a column is scaled by its sum down to that row, so that later rows have no influence
    (section 3.3). At the fixed point each row would then put all weight on the previous block: 1 over its weight on
    others grows by 2 with every step, where there are two. With 0 steps it is a softmax over rows.
    """
    if causal:
        earlier = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(-1)
        valid = earlier if valid is None else valid & earlier

    def mask_invalid(x: Tensor) -> Tensor:
        if valid is None:
            return x
        return x.masked_fill(~valid, MASK_BIAS)

    x = mask_invalid(logits)
    x = mask_invalid(x - x.logsumexp(-1, keepdim=True))
    for _ in range(steps):
        x = mask_invalid(x - (x.logcumsumexp(-2) if causal else x.logsumexp(-2, keepdim=True)))
        x = mask_invalid(x - x.logsumexp(-1, keepdim=True))
    return x.exp()


def gumbel(x: Tensor) -> Tensor:
    """Gumbel noise: the argmax of logits plus noise is a sample of their softmax (Gumbel 1954)."""
    return -torch.empty_like(x).exponential_().log()


def sinkhorn_attention(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h m b"],
    *,
    causal: bool,
    scale: float,
    present: Bool[Tensor, "n b c"] | None = None,
) -> Float[Tensor, "n h m c f"]:
    """Attention of each query block to its own block and to the block that `sort` mixes for it.

    Queries may be those of the last blocks only. Keys and values of absent tokens are zeros. A slot that received only
    a share of present tokens is a key with that share of the weight.
    """
    blocks = q.shape[2]
    size = q.shape[3]
    mask = None
    bias = None
    if present is None:
        keys, values = (_pair_with_sorted(sort, x) for x in (k, v))
    else:
        keys, values, bias = _pair_with_partial(sort, k, v, present)
    if causal:
        own_mask = torch.ones(size, size, dtype=torch.bool, device=q.device).tril()
        mask = torch.cat([own_mask, torch.ones_like(own_mask)], dim=1)
        if blocks == k.shape[2]:
            # the first block has no earlier block
            bias = torch.zeros(len(q), 1, blocks, 2 * size, dtype=q.dtype, device=q.device)
            bias[:, :, 0, size:] = -torch.inf
    bias = None if bias is None else _blocks_as_rows(bias)
    y = small_batch_attention.small_batch_attention(
        _blocks_as_rows(q), _blocks_as_rows(keys), _blocks_as_rows(values), scale=scale, mask=mask, bias=bias
    )
    return y.view(len(q), blocks, *y.shape[1:]).transpose(1, 2)


def sinkhorn_attention_reference(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h m b"],
    *,
    causal: bool,
    scale: float,
) -> Float[Tensor, "n h m c f"]:
    """The definition without absent tokens: a softmax over the sorted block and the block itself."""
    size = q.shape[3]
    ahead = k.shape[2] - q.shape[2]
    ys = []
    for block in range(q.shape[2]):
        sorted_blocks = [torch.einsum("nhb,nhbce->nhce", sort[:, :, block], x) for x in (k, v)]
        keys, values = (
            torch.cat([x, block_keys[:, :, ahead + block]], 2) for x, block_keys in zip(sorted_blocks, (k, v))
        )
        scores = q[:, :, block] @ keys.mT * scale
        if causal:
            visible = torch.ones(size, 2 * size, dtype=torch.bool, device=q.device).tril(size)
            visible[:, :size] = ahead + block > 0
            scores = scores.masked_fill(~visible, -torch.inf)
        ys.append(scores.softmax(-1) @ values)
    return torch.stack(ys, dim=2)


def sortcut_attention(
    q: Float[Tensor, "n h m c e"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    sort: Float[Tensor, "n h s b"],
    *,
    scale: float,
    present: Bool[Tensor, "n b c"] | None = None,
) -> Float[Tensor, "n h m c f"]:
    """SortCut: all queries attend to the first blocks of the sorted sequence alone (section 3.4)."""
    bias = None
    if present is None:
        keys, values = (mix_blocks(sort, x).flatten(2, 3) for x in (k, v))
    else:
        keys, values, bias = (x.flatten(2, 3) for x in mix_partial_blocks(sort, k, v, present))
        # a row without any token must have a visible key
        bias = bias.masked_fill((bias == -torch.inf).all(-1, keepdim=True), 0.0)[:, :, None]
    y = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=bias, scale=scale)
    return y.view(*q.shape[:4], v.shape[-1])


def _pair_with_sorted(sort: Float[Tensor, "n h m b"], x: Float[Tensor, "n h b c e"]) -> Float[Tensor, "n h m s e"]:
    """The last blocks, each concatenated with its sorted block."""
    y: Tensor = _PairWithSorted.apply(sort.to(x.dtype), x)  # type: ignore[no-untyped-call]
    return y


class _PairWithSorted(torch.autograd.Function):
    """Writes blocks and sorted blocks straight to the memory that attention reads."""

    @staticmethod
    def forward(ctx: Any, sort: Tensor, x: Tensor) -> Tensor:
        rows, heads, blocks, size, width = x.shape
        queries = sort.shape[2]
        y = x.new_empty(heads, rows, queries, 2, size, width)
        y[:, :, :, 0] = x[:, :, blocks - queries :].transpose(0, 1)
        own_blocks, sorted_blocks = y.flatten(4).flatten(0, 1).unbind(2)
        if queries == blocks:
            all_blocks = own_blocks
        else:
            all_blocks = x.transpose(0, 1).reshape(heads * rows, blocks, -1)
        weights = sort.transpose(0, 1).flatten(0, 1)
        torch.bmm(weights, all_blocks, out=sorted_blocks)
        ctx.save_for_backward(weights, all_blocks)
        return y.flatten(3, 4).transpose(0, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        weights, all_blocks = ctx.saved_tensors
        rows, heads, queries, pair_size, width = grad_y.shape
        grad_own, grad_sorted = grad_y.transpose(0, 1).reshape(heads * rows, queries, 2, -1).unbind(2)
        grad_sort = torch.bmm(grad_sorted, all_blocks.mT)
        grad_x = torch.bmm(weights.mT, grad_sorted)
        grad_x[:, -queries:] += grad_own
        grad_sort, grad_x = (x.view(heads, rows, *x.shape[1:]).transpose(0, 1) for x in (grad_sort, grad_x))
        return grad_sort, grad_x.view(*grad_x.shape[:3], pair_size // 2, width)


def _pair_with_partial(
    sort: Float[Tensor, "n h m b"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    present: Bool[Tensor, "n b c"],
) -> tuple[Float[Tensor, "n h m s e"], Float[Tensor, "n h m s f"], Float[Tensor, "n h m s"]]:
    """Keys and values of the last blocks with their sorted blocks, and the additive bias of their scores."""
    blocks = sort.shape[2]
    sorted_k, sorted_v, share = mix_partial_blocks(sort, k, v, present)
    keys, values = (torch.cat([x[:, :, -blocks:], y], dim=3) for x, y in ((k, sorted_k), (v, sorted_v)))
    # a block without any token must have a visible key
    visible = present | ~present.any(-1, keepdim=True)
    mask_bias = torch.zeros_like(visible, dtype=k.dtype).masked_fill(~visible, -torch.inf)[:, None, -blocks:]
    return keys, values, torch.cat([mask_bias.expand_as(share), share], dim=-1)


def mix_blocks(sort: Float[Tensor, "n h m b"], x: Float[Tensor, "n h b c e"]) -> Float[Tensor, "n h m c e"]:
    """The weighted sum of the blocks for each sorted slot."""
    return (sort.to(x.dtype) @ x.flatten(3)).view(*sort.shape[:3], *x.shape[3:])


def mix_partial_blocks(
    sort: Float[Tensor, "n h m b"],
    k: Float[Tensor, "n h b c e"],
    v: Float[Tensor, "n h b c f"],
    present: Bool[Tensor, "n b c"],
) -> tuple[Float[Tensor, "n h m c e"], Float[Tensor, "n h m c f"], Float[Tensor, "n h m c"]]:
    """Keys and values of partly filled slots, and the logarithm of the filled share, which takes no gradient."""
    share = sort.to(k.dtype) @ present[:, None].to(k.dtype)
    filled = share[..., None].clamp(min=MIN_SHARE)
    bias = share.detach().clamp(max=1.0)
    bias = bias.log().masked_fill(bias < MIN_SHARE, -torch.inf)
    return mix_blocks(sort, k) / filled, mix_blocks(sort, v) / filled, bias


def _blocks_as_rows(x: Float[Tensor, "n h m *c"]) -> Float[Tensor, "nm h *c"]:
    """Blocks moved to the batch axis."""
    return x.transpose(1, 2).flatten(0, 1)
