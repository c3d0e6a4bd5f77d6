"""Attention that also returns its log-sum-exp, and its gradient from merged outputs: the parts of blockwise attention.

Disjoint sets of keys can be attended to in separate calls: outputs are merged by their log-sum-exps, and the gradient
of each part is an ordinary attention gradient taken with the merged output and log-sum-exp (Dao et al. 2022,
arXiv:2205.14135, section 3.1 and appendix B.4). Torch's fused kernel for CPUs computes all of this, but only through
private operators; where they are missing or do not apply, the scores are written out, a block of queries at a time.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.nn.runtime.torch_internals import has_flash_attention_on_cpu

BLOCK = 256
"""Queries per block where scores are written out: the extra memory is this many rows of scores."""

FUSED = has_flash_attention_on_cpu()
"""Whether the installed torch has the private operators."""


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
    ys = []
    lses = []
    for begin in range(0, q.shape[2], BLOCK):
        scores = _scores(q, k, bias, begin, scale=scale, causal=causal)
        lse = scores.logsumexp(-1)
        ys.append((scores - lse[..., None]).exp().to(v.dtype) @ v)
        lses.append(lse)
    return torch.cat(ys, dim=2), torch.cat(lses, dim=2)


def attention_backward(
    grad_y: Float[Tensor, "b h l f"],
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
    """Gradients of q, k and v; `y` and `lse` are those over all keys, of which `k` may hold only a part."""
    if flash_applies(q, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
            grad_y, q, k, v, y, lse, 0.0, causal, attn_mask=bias, scale=scale
        )
    # the gradient of a softmax: weights times (their own gradient minus its mean under the weights), which is dy . y
    delta = (grad_y * y).sum(-1)
    grad_q = torch.zeros_like(q)
    grad_k = torch.zeros_like(k)
    grad_v = torch.zeros_like(v)
    for begin in range(0, q.shape[2], BLOCK):
        rows = slice(begin, begin + BLOCK)
        scores = _scores(q, k, bias, begin, scale=scale, causal=causal)
        # weights over all keys, as `lse` is: those of the keys here need not sum to 1
        weights = (scores - lse[:, :, rows, None]).exp().to(v.dtype)
        grad_scores = weights * (grad_y[:, :, rows] @ v.mT - delta[:, :, rows, None]) * scale
        grad_v += weights.mT @ grad_y[:, :, rows]
        grad_q[:, :, rows] = grad_scores @ k
        grad_k += grad_scores.mT @ q[:, :, rows]
    return grad_q, grad_k, grad_v


def merge_lse(
    y: Float[Tensor, "*n f"], lse: Float[Tensor, "*n"], new_y: Float[Tensor, "*n f"], new_lse: Float[Tensor, "*n"]
) -> None:
    """Merge `new_y` and `new_lse`, attention over other keys, into `y` and `lse` in place; -inf stands for no key."""
    # each output is a mean under its own keys; its share of the whole is the exponential of what its lse lacks
    merged_lse = torch.logaddexp(lse, new_lse)
    # -inf minus -inf where neither side has a visible key
    old_share, new_share = ((x - merged_lse).exp().nan_to_num(0.0)[..., None].to(y.dtype) for x in (lse, new_lse))
    y.mul_(old_share).addcmul_(new_y, new_share)
    lse.copy_(merged_lse)


def flash_applies(q: Tensor, v: Tensor) -> bool:
    """Whether torch's CPU kernel supports these inputs: on a CPU, with values as wide as keys."""
    return FUSED and q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and min(q.shape) > 0


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, begin: int, *, scale: float, causal: bool
) -> Float[Tensor, "b h l s"]:
    """The scores of the block of queries from `begin` on, in float32 at least."""
    rows = slice(begin, begin + BLOCK)
    compute_dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q[:, :, rows] @ k.mT).to(compute_dtype) * scale
    if bias is not None:
        scores = scores + bias[:, :, rows]
    if causal:
        later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(begin + 1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores
