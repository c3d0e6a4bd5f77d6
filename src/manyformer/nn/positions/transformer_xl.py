"""Transformer-XL's relative positions: projected sinusoids of the distance between query and key."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.nn.core import AlignedLayout, ContiguousLayout, StepLayout, TokenPositions
from manyformer.nn.positions.absolute import check_sinusoid, sinusoid_table, table_dtype
from manyformer.nn.positions.position import (
    DistanceTerms,
    Keys,
    PairScores,
    Position,
    Queries,
    signed_distances,
    toeplitz_view,
)
from manyformer.nn.runtime.device_reads import reads_are_free
from manyformer.nn.runtime.head_selection import HeadSelection, PerHeadTensors, select_head_outputs
from manyformer.nn.runtime.torch_internals import has_autocast, is_plain, is_traced, weight_dtype

MAX_TABLE_DISTANCE = 1 << 13
"""A table of sinusoids ends at this distance; those of larger distances are computed at every call."""

PROJECTION_MARGIN = 256
"""Distances beyond the requested ones that are projected in advance for the next decoding steps."""


class _ProjectedDistances(NamedTuple):
    """The projected sinusoids of a range of distances, and what they were computed from, which makes them stale."""

    origin: tuple[object, ...]
    lookback: int
    lookahead: int
    vectors: Float[Tensor, "h r e"]


@final
class TransformerXLBiases(PerHeadTensors):
    """The vectors u and v per head that are added to queries in content and position terms (Dai et al. 2019, 3.3).

    In the paper all layers share them: pass the same object to each.
    """

    head_axes = (("u", -2), ("v", -2))

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.u, self.v = (nn.Parameter(torch.randn(heads, width) * 0.02) for _ in range(2))


@final
class TransformerXLPosition(Position, PerHeadTensors):
    """Scores ((q_i + u) k_j + (q_i + v) W R_{i-j}) / sqrt(e), R the sinusoid (Dai et al. 2019, arXiv:1901.02860, 3.3).

    Distances are differences of position ids and may be negative, so any mask, cache and memory is supported; there is
    no table to shift. `dim` is the width of R, `width` that of a head, dim / heads by default. `biases` are u and v,
    new ones by default. Distances beyond `clamp` are set to it; the authors set it for evaluation only, so it may be
    assigned later. `dropout` acts on R while training. As in the paper, scores must be scaled by 1 / sqrt(e), the
    default of `SoftmaxKernel`. The paper's projections have no biases: `Attention(bias=False)`.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        width: int | None = None,
        biases: TransformerXLBiases | None = None,
        clamp: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sinusoid(dim, "halves", "TransformerXLPosition")
        if width is None and dim % heads:
            raise ValueError(f"TransformerXLPosition: dim ({dim}) must be a multiple of heads ({heads})")
        width = dim // heads if width is None else width
        if biases is not None and biases.u.shape != (heads, width):
            raise ValueError(
                f"TransformerXLPosition: biases of shape {tuple(biases.u.shape)} do not fit {heads} heads "
                f"of width {width}"
            )
        self.dim = dim
        self.heads = heads
        self.clamp = clamp
        if biases is None:
            self.biases = TransformerXLBiases(heads, width)
        else:
            self.biases = biases
        self.r_proj = nn.Linear(dim, heads * width, bias=False)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.r_proj.weight, std=0.02)
        # no buffer: converting the model to another dtype must not round the table
        self._table: Tensor | None = None
        self._projected: _ProjectedDistances | None = None

    @property
    def query_vector(self) -> Float[Tensor, "h e"]:
        return self.biases.u

    def query(self, q: Float[Tensor, "b h l e"], positions: TokenPositions) -> Float[Tensor, "b h l e"]:
        # the kernel's product of query and key then is the complete content term
        return q + self.biases.u[:, None]

    def score(
        self, logits: PairScores, q: Queries, k: Keys, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> PairScores:
        distances, lookback, lookahead = _pair_distances(query_positions, key_positions, has_all_keys=self.training)
        vectors = self.distance_vectors(lookback, lookahead)
        # `query` has added u already, which this takes away again: (q + v) of the paper
        distance_scores: Tensor = (q + (self.biases.v - self.biases.u)[:, None]) @ vectors.mT * q.shape[-1] ** -0.5
        if distances is None:
            return logits + toeplitz_view(distance_scores, k.shape[2])
        return logits + distance_scores.gather(-1, (distances + lookback)[:, None].expand(logits.shape))

    def distance_terms(self, lookback: int, lookahead: int) -> DistanceTerms:
        vectors = self.distance_vectors(lookback, lookahead) * self.biases.u.shape[1] ** -0.5
        return DistanceTerms(lookback, lookahead, keys=vectors, query_bias=self.biases.v - self.biases.u)

    def distance_vectors(self, lookback: int, lookahead: int) -> Float[Tensor, "h r e"]:
        """W R for keys from `lookback` before to `lookahead` after their query, the earliest key first."""
        # the cache of projections notices changes of the one weight alone
        if not is_plain(self.r_proj, nn.Linear):
            return self._project(lookback, lookahead)
        weight = self.r_proj.weight
        device_type = weight.device.type
        # weights created in inference mode have no version counter that shows a change
        may_change = torch.is_grad_enabled() or is_traced() or weight.is_inference()
        if may_change or (self.training and self.dropout.p):
            return self._project(lookback, lookahead)
        # when decoding one token, projecting all distances would take longer than the rest of the step
        autocast = has_autocast(device_type) and torch.is_autocast_enabled(device_type)
        origin = (weight.data_ptr(), weight._version, weight.dtype, weight.device, autocast, self.clamp)
        projected = self._projected
        is_stale = projected is None or projected.origin != origin
        if projected is None or is_stale or lookback > projected.lookback or lookahead > projected.lookahead:
            limits = max(lookback, 0) + PROJECTION_MARGIN, max(lookahead, 0)
            # outside inference mode: see `_sinusoids`
            with torch.inference_mode(mode=False), torch.no_grad():
                projected = _ProjectedDistances(origin, *limits, self._project(*limits))
            self._projected = projected
        start = projected.lookback - lookback
        return projected.vectors[:, start : start + lookback + lookahead + 1]

    def _project(self, lookback: int, lookahead: int) -> Float[Tensor, "h r e"]:
        vectors: Tensor = self.r_proj(self.dropout(self._sinusoids(lookback, lookahead).to(weight_dtype(self.r_proj))))
        # (r, h e) to (h, r, e), as scores are multiplied head by head
        return vectors.view(vectors.shape[0], self.heads, -1).transpose(0, 1)

    def _sinusoids(self, lookback: int, lookahead: int) -> Float[Tensor, "r d"]:
        """R for these distances, from a table up to `MAX_TABLE_DISTANCE`: sines take longer than the projection."""
        device = self.biases.u.device
        dtype = table_dtype(weight_dtype(self.r_proj))
        distances = torch.arange(-lookback, lookahead + 1, device=device)
        if self.clamp is not None:
            distances = distances.clamp(-self.clamp, self.clamp)
        max_distance = max(abs(lookback), abs(lookahead))
        if max_distance > MAX_TABLE_DISTANCE or is_traced():
            return sinusoid_table(-distances, self.dim, "halves", dtype=dtype)
        table = self._table
        is_stale = table is None or (table.device, table.dtype) != (device, dtype)
        if table is None or is_stale or max_distance > len(table) // 2:
            max_distance = min(2 * max_distance, MAX_TABLE_DISTANCE)
            # outside inference mode, whose tensors could not be used in training later
            with torch.inference_mode(mode=False):
                table_distances = torch.arange(-max_distance, max_distance + 1, device=device)
                self._table = table = sinusoid_table(-table_distances, self.dim, "halves", dtype=dtype)
        zero_row = len(table) // 2
        if self.clamp is not None:
            return table[distances + zero_row]
        return table[zero_row - lookback : zero_row + lookahead + 1]

    # the signature of torch.nn.Module
    def train(self, mode: bool = True) -> "TransformerXLPosition":  # noqa: FBT001, FBT002
        # sharded weights are freed and gathered again, and may change without a change of `origin`
        self._projected = None
        return super().train(mode)

    def keep_heads(self, selection: HeadSelection) -> None:
        super().keep_heads(selection)
        select_head_outputs(self.r_proj, selection)
        self._projected = None

    def extra_repr(self) -> str:
        return f"{self.heads} heads" + (f", clamp={self.clamp}" if self.clamp is not None else "")


def _pair_distances(
    query_positions: TokenPositions, key_positions: TokenPositions, *, has_all_keys: bool
) -> tuple[Int[Tensor, "b l s"] | None, int, int]:
    """The signed distance of each pair, None if both layouts are contiguous or aligned; the lookback and the lookahead.

    Pairs of different documents or with padding, which never attend, get distance 0. With `has_all_keys` no key
    between two others has been evicted, as in training: their number then bounds distances, and no GPU is read.
    """
    query_layout = query_positions.layout
    key_layout = key_positions.layout
    aligned = (ContiguousLayout, AlignedLayout)
    if isinstance(query_layout, aligned) and isinstance(key_layout, aligned):
        queries = query_positions.position_ids.shape[1]
        keys = key_positions.position_ids.shape[1]
        start_difference = key_layout.start - query_layout.start
        return None, queries - 1 - start_difference, start_difference + keys - 1
    same_document = query_positions.same_document(key_positions)
    distances = torch.where(same_document, signed_distances(query_positions, key_positions), 0)
    if isinstance(query_layout, StepLayout):
        # no key of the document comes after the token of a step
        return distances, query_layout.position_limit - 1, 0
    if not distances.numel():
        return distances, 0, 0
    if distances.is_meta:
        # without values, as many distances as pairs of adjacent queries and keys have
        return distances, sum(distances.shape[1:]) - 2, 0
    if has_all_keys and not reads_are_free(distances):
        return distances, distances.shape[2] - 1, distances.shape[1] - 1
    # reads tensor values, so a GPU is synchronized
    minimum, maximum = (int(edge) for edge in torch.aminmax(distances))
    return distances, -minimum, maximum
