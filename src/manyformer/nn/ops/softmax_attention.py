"""Softmax attention: the definition, torch's fused kernel, and one call per document."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from manyformer.nn.core import PackedLayout, TokenPositions
from manyformer.nn.positions.position import Position
from manyformer.nn.runtime.dropout import drop
from manyformer.nn.runtime.handwritten_gradient import is_within_plain_operations
from manyformer.nn.runtime.torch_internals import attention_by_definition


def softmax_attention_reference(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    mask: Bool[Tensor, "#b #h l s"],
    *,
    scale: float,
    position: Position,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    dropout: float = 0.0,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
    """Outputs and weights by the paper's formula, with every hook of a position; softmax in float32 at least."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    weights = masked_softmax(position.score(q @ k.mT * scale, q, k, query_positions, key_positions), mask).to(q.dtype)
    dropped = drop(weights, dropout)
    return position.value(dropped @ v, dropped, query_positions, key_positions), weights


def masked_softmax(logits: Float[Tensor, "#b #h l s"], mask: Bool[Tensor, "#b #h l s"]) -> Float[Tensor, "b h l s"]:
    """The softmax over visible keys, in float32 at least; zeros in a row that has none."""
    logits = logits.masked_fill(~mask, -torch.inf)
    # a row without a visible key is all -inf: its softmax would be nan, its weights are defined as zero
    has_key = mask.any(-1, keepdim=True)
    compute_dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits.masked_fill(~has_key, 0.0).softmax(-1, dtype=compute_dtype).masked_fill(~mask, 0.0)


def fused_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    mask: Bool[Tensor, "#b #h l s"] | None,
    *,
    causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "b h l f"]:
    """`torch.nn.functional.scaled_dot_product_attention`; `causal` aligns the first query with the first key.

    A query that sees no key gets zeros; a single query on a GPU must see one."""
    width_gap = q.shape[-1] - v.shape[-1]
    width = v.shape[-1]
    # on a CPU torch materializes all pairs unless keys and values are equally wide; a single query has few; "meta"
    # tensors are used to estimate CPU costs
    if width_gap and q.device.type in ("cpu", "meta") and q.shape[2] > 1:
        q, k, v = (F.pad(x, (0, max(0, padding))) for x, padding in ((q, -width_gap), (k, -width_gap), (v, width_gap)))
    has_key = None
    if mask is not None and mask.dtype == torch.bool and needs_a_key(q):
        # such a query sees every key, and its output is replaced
        has_key = mask.any(-1, keepdim=True)
        mask = mask | ~has_key
    y = torch_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
        enable_gqa=bool(q.shape[1] != k.shape[1]),
    )
    if has_key is not None:
        y = y.masked_fill(~has_key, 0.0)
    padded = y.shape[-1] - width
    if padded:
        return torch.split(y, [width, padded], dim=-1)[0]
    return y


def torch_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    *,
    attn_mask: Shaped[Tensor, "*#rows #l s"] | None = None,
    **options: Any,
) -> Float[Tensor, "b h l f"]:
    """`scaled_dot_product_attention`, inside of `plain_operations` by its definition, which has a second derivative.

    `torch.nn.attention.sdpa_kernel` would choose that for all threads."""
    if not is_within_plain_operations():
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    return attention_by_definition(q, k, v, attn_mask, **options)


def needs_a_key(q: Float[Tensor, "b h l e"]) -> bool:
    """Whether torch's fused kernels may give nan, also as gradients, for one of several queries that sees no key."""
    return q.device.type not in ("cpu", "meta") and q.shape[2] > 1


def map_documents(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g l e"],
    v: Float[Tensor, "b g l f"],
    layout: PackedLayout,
    attention: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Float[Tensor, "b h l f"]:
    """Apply `attention` to each document of packed rows separately; padding gives zeros.

    All rows are concatenated and split into documents and gaps, because the gradient of one split is a single
    concatenation, where that of many slices would be as many tensors of full size.
    """
    rows = q.shape[0]
    length = q.shape[2]
    sizes, is_document = _document_cuts(layout, rows, length)
    # tokens first: documents and gaps are consecutive pieces of all rows end to end
    parts = [torch.split(x.transpose(1, 2).flatten(0, 1), sizes) for x in (q, k, v)]
    width = (q.shape[1], v.shape[-1])
    pieces = [
        # a document is (l, h, e) here and (1, h, l, e) for `attention`
        attention(*(x.transpose(0, 1)[None] for x in (a, b, c)))[0].transpose(0, 1)
        if document
        else q.new_zeros(a.shape[0], *width)
        for a, b, c, document in zip(*parts, is_document)
    ]
    return torch.cat(pieces).view(rows, length, *width).transpose(1, 2)


def _document_cuts(layout: PackedLayout, rows: int, length: int) -> tuple[list[int], list[bool]]:
    """Sizes of documents and of gaps between them in concatenated rows, and which of them are documents."""
    sizes = []
    is_document = []
    offset = 0
    for row, begin, end in layout.documents:
        if gap := row * length + begin - offset:
            sizes.append(gap)
            is_document.append(False)
        sizes.append(end - begin)
        is_document.append(True)
        offset = row * length + end
    if gap := rows * length - offset:
        sizes.append(gap)
        is_document.append(False)
    return sizes, is_document


def region_shares(
    weights: Float[Tensor, "b h l s"], sizes: list[int], valid: Bool[Tensor, "b l"]
) -> Float[Tensor, " regions"]:
    """Mean total weight of the valid queries on each of the adjacent regions of `sizes` keys."""
    return torch.stack([part.sum(-1).mean(1)[valid].mean() for part in torch.split(weights, sizes, -1)])
