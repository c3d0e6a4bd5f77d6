"""FlexAttention by its definition, all pairs at once, in place of the kernel that only a GPU can compile."""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as flex
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from pretended_device.tensor import PretendedTensor

_flex_attention = flex.flex_attention


def defined_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Any:
    """What `flex_attention` returns, for pretended tensors, from the formula: only listed blocks are visible."""
    if not isinstance(query, PretendedTensor):
        return _flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, **options)
    if options.get("return_lse") or options.get("return_aux") is not None:
        raise NotImplementedError("the pretended device returns no log-sum-exp of FlexAttention")
    if key.shape[1] != query.shape[1]:
        assert enable_gqa, "FlexAttention refuses fewer heads of keys than of queries without enable_gqa"
        repeats = query.shape[1] // key.shape[1]
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    batch, heads, queries, width = query.shape
    row = torch.arange(batch, device=query.device)[:, None, None, None]
    head = torch.arange(heads, device=query.device)[:, None, None]
    i = torch.arange(queries, device=query.device)[:, None]
    j = torch.arange(key.shape[2], device=query.device)
    scores = (query @ key.transpose(-1, -2)) * (width**-0.5 if scale is None else scale)
    if score_mod is not None:
        scores = score_mod(scores, row, head, i, j)
    if block_mask is None:
        return scores.softmax(-1) @ value
    visible = _in_blocks(block_mask.kv_num_blocks, block_mask.kv_indices, block_mask, scores)
    visible = visible & block_mask.mask_mod(row, head, i, j)
    if block_mask.full_kv_num_blocks is not None:
        assert block_mask.full_kv_indices is not None
        visible = visible | _in_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, block_mask, scores)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    # a query that sees no key gets zeros
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0.0) @ value


def _in_blocks(counts: Tensor, columns: Tensor, block_mask: BlockMask, scores: Tensor) -> Tensor:
    """Which pairs (b, h, l, s) are in the blocks that the mask lists: their columns, and how many of them count."""
    for part in (counts, columns):
        if not isinstance(part, PretendedTensor):
            raise RuntimeError("the queries of FlexAttention are on cuda:0, its block mask is on the CPU")
    block_rows, block_columns = block_mask.BLOCK_SIZE
    is_listed = torch.arange(columns.shape[-1], device=columns.device) < counts[..., None]
    visible = torch.zeros_like(columns, dtype=torch.long).scatter_add(-1, columns.long(), is_listed.long()) > 0
    visible = visible.repeat_interleave(block_rows, -2).repeat_interleave(block_columns, -1)
    return visible[..., : scores.shape[-2], : scores.shape[-1]]


def replace_flex_attention() -> Callable[[], None]:
    """Put the definition where torch and the package have imported FlexAttention; returns what undoes it."""
    changed = []
    for name, module in list(sys.modules.items()):
        is_of_package = name.partition(".")[0] == "manyformer"
        if (is_of_package or module is flex) and vars(module).get("flex_attention") is _flex_attention:
            module.flex_attention = defined_flex_attention  # type: ignore[attr-defined]
            changed.append(module)

    def undo() -> None:
        for module in changed:
            module.flex_attention = _flex_attention  # type: ignore[attr-defined]

    return undo
