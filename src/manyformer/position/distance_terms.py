"""Terms of positions that depend on the distance between query and key alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.core import ContiguousLayout, TokenPositions


class DistanceTerms(NamedTuple):
    """Terms of a position as functions of the signed distance r = j - i of key j from query i, negative for the past.

    It adds bias[r] + (q + query_bias) keys[r] to a score, already scaled, and values[r] to the value of a key. Row 0 is
    r = -lookback and the last row r = lookahead; these two rows also serve all larger distances.
    """

    lookback: int
    lookahead: int
    bias: Float[Tensor, "#h r"] | None = None
    keys: Float[Tensor, "#h r e"] | None = None
    values: Float[Tensor, "#h r f"] | None = None
    query_bias: Float[Tensor, "h e"] | None = None


def signed_distances(query_positions: TokenPositions, key_positions: TokenPositions) -> Int[Tensor, "#b l s"]:
    """Key position minus query position of every pair; one row if all rows of the batch have the same positions."""
    if isinstance(query_positions.layout, ContiguousLayout) and isinstance(key_positions.layout, ContiguousLayout):
        return key_positions.position_ids[:1, None, :] - query_positions.position_ids[:1, :, None]
    return key_positions.position_ids[:, None, :] - query_positions.position_ids[:, :, None]


def evaluate_distances(
    function: Callable[[Tensor], Tensor], query_positions: TokenPositions, key_positions: TokenPositions
) -> Float[Tensor, "#b h l s"]:
    """`function` of the signed distances of all pairs; it maps distances (*p) to a number for each head, (h, *p)."""
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    if isinstance(query_layout, ContiguousLayout) and isinstance(key_layout, ContiguousLayout):
        # evaluated once per distance, of which there are fewer than pairs
        start_difference = key_layout.start - query_layout.start
        query_count = query_positions.position_ids.shape[1]
        first = start_difference - query_count + 1
        stop = start_difference + key_positions.position_ids.shape[1]
        distances = torch.arange(first, stop, device=key_positions.position_ids.device)
        return broadcast_pairs(function(distances), query_count)[None]
    return function(signed_distances(query_positions, key_positions)).transpose(0, 1)


def toeplitz_view(by_distance: Float[Tensor, "*b l n"], key_count: int) -> Float[Tensor, "*b l s"]:
    """A view of columns by distance as columns by key, for queries and keys that are each contiguous, without a copy.

    The n = l + `key_count` - 1 columns are rising distances, from that between the first key and the last query. Entry
    (i, j) of the result is entry (i, l - 1 - i + j) of `by_distance`; as all distances are present, nothing wraps.
    """
    query_count, columns = by_distance.shape[-2:]
    if query_count == 1:
        return by_distance
    # each row of the result begins one column earlier than the previous row
    flat = by_distance.flatten(-2)[..., query_count - 1 : query_count * columns - 1]
    return flat.view(*flat.shape[:-1], query_count, columns - 1)[..., :key_count]


def broadcast_pairs(row: Float[Tensor, "*b n"], query_count: int) -> Float[Tensor, "*b l s"]:
    """`toeplitz_view` of a row that is the same for all queries."""
    return row.unfold(-1, row.shape[-1] - query_count + 1, 1).flip(-2)
