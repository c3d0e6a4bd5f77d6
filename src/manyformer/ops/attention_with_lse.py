"""Attention that also gives its log-sum-exp, and its gradient from merged results: what blockwise attention is made of.

Disjoint sets of keys can be attended to in separate calls: outputs are merged by their log-sum-exps, and the gradient
of each part is an ordinary attention gradient taken with the merged output and log-sum-exp (Dao et al. 2022,
arXiv:2205.14135, section 3.1 and appendix B.4). Torch's fused kernel for CPUs gives all of this, but only through
private operators; where they are missing or cannot serve, the same is written out, a block of queries at a time.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

BLOCK = 256
"""Queries in a block of the written-out form: its extra memory is this many rows of scores."""

FUSED = all(
    hasattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}") for suffix in ("", "_backward")
)
"""Whether this torch has the private operators."""


def attention_forward(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    *,
    scale: float,
    bias: Float[Tensor, "#b #h l s"] | None = None,
    causal: bool = False,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l"]]:
    """Outputs and log-sum-exps of the scores `scale` q k + `bias`; every query must see a key.

    `causal` aligns the first query with the first key. `bias` may be -inf, and any view whose last stride is 1; it is
    added as it is, not scaled.
    """
    if flash_applies(q, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            q, k, v, 0.0, causal, attn_mask=bias, scale=scale
        )
    ys, lses = [], []
    for begin, end in _blocks(q.shape[2]):
        scores = _scores(q, k, bias, begin, end, scale=scale, causal=causal)
        lse = scores.logsumexp(-1)
        ys.append((scores - lse[..., None]).exp().to(v.dtype) @ v)
        lses.append(lse)
    return torch.cat(ys, dim=2), torch.cat(lses, dim=2)


def attention_backward(
    up: Float[Tensor, "b h l f"],
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    y: Float[Tensor, "b h l f"],
    lse: Float[Tensor, "b h l"],
    *,
    scale: float,
    bias: Float[Tensor, "#b #h l s"] | None = None,
    causal: bool = False,
) -> tuple[Float[Tensor, "b h l e"], Float[Tensor, "b h s e"], Float[Tensor, "b h s f"]]:
    """Gradients of q, k and v; `y` and `lse` are those over all keys, of which the given ones may be a part."""
    if flash_applies(q, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            up, q, k, v, y, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    slope = (up * y).sum(-1)
    to_q, to_k, to_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for begin, end in _blocks(q.shape[2]):
        rows = slice(begin, end)
        scores = _scores(q, k, bias, begin, end, scale=scale, causal=causal)
        weights = (scores - lse[:, :, rows, None]).exp().to(v.dtype)
        inner = weights * (up[:, :, rows] @ v.mT - slope[:, :, rows, None]) * scale
        to_v += weights.mT @ up[:, :, rows]
        to_q[:, :, rows] = inner @ k
        to_k += inner.mT @ q[:, :, rows]
    return to_q, to_k, to_v


def merge_lse(
    y: Float[Tensor, "*n f"], lse: Float[Tensor, "*n"], new: Float[Tensor, "*n f"], sums: Float[Tensor, "*n"]
) -> None:
    """Let outputs `y` and their `lse` also be about other keys, whose own are `new` and `sums`; -inf is no key."""
    after = torch.logaddexp(lse, sums)
    # where nothing is visible yet, -inf less -inf
    old, more = ((x - after).exp().nan_to_num(0.0)[..., None].to(y.dtype) for x in (lse, sums))
    y.mul_(old).addcmul_(new, more)
    lse.copy_(after)


def flash_applies(q: Tensor, v: Tensor) -> bool:
    """Whether torch's kernel takes these: on a CPU, with values as wide as keys."""
    return FUSED and q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and min(q.shape) > 0


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + BLOCK, length)) for begin in range(0, length, BLOCK))


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, begin: int, end: int, *, scale: float, causal: bool
) -> Float[Tensor, "b h l s"]:
    """The scores of some rows, in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q[:, :, begin:end] @ k.mT).to(wide) * scale
    if bias is not None:
        scores = scores + bias[:, :, begin:end]
    if causal:
        later = torch.ones(end - begin, k.shape[2], dtype=torch.bool, device=q.device).triu(begin + 1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores
