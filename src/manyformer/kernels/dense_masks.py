"""Dense masks of the pairs of a call, those of layouts alone kept for the next calls."""

from functools import lru_cache

import torch
from jaxtyping import Bool
from torch import Tensor

from manyformer.core import ContiguousLayout, PrefixedLayout, StepLayout, TokenPositions
from manyformer.costs.cost_model import COSTS
from manyformer.masks import Mask
from manyformer.ops.static_layout import layout_is_complete, materialize

MIN_PAIRS_FOR_PLAN = COSTS.min_planned_pairs


def dense_mask(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, heads: int
) -> Bool[Tensor, "b h l s"]:
    """The dense mask, cached if it is small and depends on layouts alone."""
    layout = query_positions.layout
    if isinstance(layout, StepLayout) and key_positions is layout.keys:
        masks, key = layout.masks, (mask, heads)
        if key not in masks:
            masks[key] = mask.dense(query_positions, key_positions, heads)
        return masks[key]
    queries, keys = query_positions.position_ids.shape[1], key_positions.position_ids.shape[1]
    is_small = queries * keys <= MIN_PAIRS_FOR_PLAN and query_positions.position_ids.device.type == "cpu"
    is_complete = is_small and layout_is_complete(query_positions) and layout_is_complete(key_positions)
    if is_complete and not torch.compiler.is_compiling():
        return _cached_dense_mask(mask, heads, query_positions.layout, key_positions.layout, queries, keys)
    return mask.dense(query_positions, key_positions, heads)


@lru_cache(maxsize=64)
def _cached_dense_mask(
    mask: Mask,
    heads: int,
    query_layout: ContiguousLayout | PrefixedLayout,
    key_layout: ContiguousLayout | PrefixedLayout,
    queries: int,
    keys: int,
) -> Bool[Tensor, "1 h l s"]:
    return mask.dense(materialize(query_layout, queries), materialize(key_layout, keys), heads)
