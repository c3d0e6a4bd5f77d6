"""Global summary tokens that are prepended to a text (Ainslie et al. 2020; Zaheer et al. 2020, "ETC")."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from manyformer.nn.core import (
    PADDING_SEGMENT,
    SUMMARY_ROLE,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    MakesStream,
    PackedLayout,
    PrefixedLayout,
    State,
    TokenPositions,
    WeightAxes,
)
from manyformer.nn.masks.mask import part_ids_of, roles_of
from manyformer.nn.ops.static_layout import has_roles_or_parts, materialize
from manyformer.nn.runtime.devices import send
from manyformer.nn.runtime.torch_internals import compiler_disabled, count_blocks
from manyformer.nn.runtime.training_hooks import UndecayedParameters

MAX_PARTS = 1 << 32
"""An upper bound of the number of parts of a document: segment * MAX_PARTS + part sorts by document, then by part."""

NO_PART = torch.iinfo(torch.int64).max
"""Stands for a token without a part, and is sorted last."""


class SummaryTokens(ABC):
    """The number, positions and parts of the summaries of a document."""

    vector_count: int
    """The number of distinct learned summary embeddings."""
    cross_labels: Literal[1, 2]
    """The number of labels of summary-token pairs: 2 if a token may belong to the part of a summary, else 1."""

    @abstractmethod
    def layout(self, length: int) -> PrefixedLayout:
        """The layout of one document of `length` tokens with its summaries, without padding."""

    @abstractmethod
    def part_ids_of(self, positions: TokenPositions) -> Int[Tensor, "b l"] | None:
        """The part id of each token; None if there are no parts."""

    @abstractmethod
    def list_summaries(self, segment_ids: Int[Tensor, " l"], part_ids: Int[Tensor, " l"]) -> Int[Tensor, "n 3"]:
        """The segment, position and part of each summary of one row, whose valid tokens are passed."""


@final
@dataclass(frozen=True)
class PartSummaries(SummaryTokens):
    """One summary per part of a document; parts are `part_length` tokens long unless `part_ids` are passed."""

    part_length: int
    vector_count = 1
    cross_labels = 2

    def __post_init__(self) -> None:
        if self.part_length < 1:
            raise ValueError(f"PartSummaries: part_length ({self.part_length}) must be at least 1")

    def layout(self, length: int) -> PrefixedLayout:
        return PrefixedLayout(count_blocks(length, self.part_length), ContiguousLayout(), self.part_length)

    def part_ids_of(self, positions: TokenPositions) -> Int[Tensor, "b l"]:
        if positions.part_ids is None:
            return positions.position_ids // self.part_length
        return positions.part_ids

    def list_summaries(self, segment_ids: Int[Tensor, " l"], part_ids: Int[Tensor, " l"]) -> Int[Tensor, "n 3"]:
        # a summary has the number of its part as its position
        summaries = torch.stack([segment_ids, part_ids, part_ids], -1)[part_ids >= 0]
        distinct: Tensor = torch.unique(summaries, dim=0)
        return distinct

    def list_at_most(
        self, count: int, segment_ids: Int[Tensor, "b l"], part_ids: Int[Tensor, "b l"]
    ) -> Int[Tensor, "3 b n"]:
        """The segments, positions and parts of the first `count` summaries of each row, and padding, on its device."""
        is_in_part = (segment_ids != PADDING_SEGMENT) & (part_ids >= 0)
        # sorted by document and part, so that equal ones are adjacent and those without come last
        keys = torch.where(is_in_part, segment_ids * MAX_PARTS + part_ids, NO_PART).sort(1).values
        is_first = torch.ones_like(keys, dtype=torch.bool)
        is_first[:, 1:] = keys[:, 1:] != keys[:, :-1]
        # the number of the part in its row; what exceeds `count` goes to one more column, which is cut off
        ranks = (is_first.cumsum(1) - 1).clamp(max=count)
        listed = torch.full((len(keys), count + 1), NO_PART, device=keys.device).scatter_(1, ranks, keys)[:, :count]
        is_there = listed != NO_PART
        segments = torch.where(is_there, listed // MAX_PARTS, PADDING_SEGMENT)
        parts = listed % MAX_PARTS
        return torch.stack([segments, torch.where(is_there, parts, 0), torch.where(is_there, parts, -1)])


@final
@dataclass(frozen=True)
class LeadingSummaries(SummaryTokens):
    """`count` summaries before each document, of no part, each with its own embedding."""

    count: int
    cross_labels = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"LeadingSummaries: count ({self.count}) must be at least 1")

    @property
    def vector_count(self) -> int:  # type: ignore[override]
        return self.count

    def layout(self, length: int) -> PrefixedLayout:
        return PrefixedLayout(self.count, ContiguousLayout())

    def part_ids_of(self, positions: TokenPositions) -> None:
        return None

    def list_summaries(self, segment_ids: Int[Tensor, " l"], part_ids: Int[Tensor, " l"]) -> Int[Tensor, "n 3"]:
        indices = torch.arange(self.count)
        documents = torch.unique(segment_ids)
        segments = documents.repeat_interleave(self.count)
        positions = indices.repeat(len(documents))
        return torch.stack([segments, positions, torch.full_like(positions, -1)], -1)


class SummaryAndText(NamedTuple):
    """The outputs for summaries and text, and the positions of the summaries."""

    summaries: Float[Tensor, "b n d"]
    text: LayerOutput
    positions: TokenPositions


@final
class SummaryPrefixedLayer(Layer, MakesStream, UndecayedParameters):
    """Applies `inner` to a text with its summaries prepended, and returns the outputs of the text.

    Summaries have the role `SUMMARY_ROLE`, by which masks and positions of `inner` distinguish them from the text. It
    is bidirectional, so it has no decoding state."""

    undecayed = ("vectors",)

    def __init__(self, inner: Layer, dim: int, summaries: SummaryTokens) -> None:
        super().__init__()
        self.inner = inner
        self.summary_tokens = summaries
        # input tokens are normalized, so embeddings have unit variance
        self.vectors = nn.Parameter(torch.randn(summaries.vector_count, dim))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state:
            raise ValueError("SummaryPrefixedLayer is bidirectional: it cannot continue from a state")
        return self.summaries_and_text(x, ctx).text

    def summaries_and_text(
        self, x: Float[Tensor, "b l d"], ctx: Context, *, max_parts: int | None = None
    ) -> SummaryAndText:
        """The outputs of `inner` for summaries and text, whose rows are known to have at most `max_parts` parts."""
        positions = self.prefixed_positions(ctx.positions, x.shape[0], max_parts=max_parts)
        assert isinstance(positions.layout, PrefixedLayout)
        prefix = positions.layout.prefix
        # one vector for every part, or one for each of the leading summaries, whose position is below their number
        summary_inputs = self.vectors[positions.position_ids[:, :prefix] % len(self.vectors)]
        out = self.inner(torch.cat([summary_inputs.to(x.dtype), x], 1), Context(positions, ctx.memory, ctx.watch))
        summaries, text = torch.split(out.y, [prefix, x.shape[1]], 1)
        return SummaryAndText(summaries, LayerOutput(text, None, out.loss), positions.columns(0, prefix))

    def outer_axes(self, axes: WeightAxes) -> WeightAxes:
        return axes.with_summaries()

    def prefixed_positions(self, text: TokenPositions, batch: int, *, max_parts: int | None = None) -> TokenPositions:
        """The positions of summaries and text, in this order.

        The host has to read the documents and parts of rows, unless their layout or `max_parts` bounds the summaries.
        """
        layout = self.summary_tokens.layout(text.position_ids.shape[1])
        if isinstance(text.layout, ContiguousLayout) and text.layout.start == 0 and not has_roles_or_parts(text):
            # one document from position 0 on: everything follows from its length, and nothing need be read
            materialized = materialize(layout, layout.prefix + text.position_ids.shape[1], text.position_ids.device)
            fields = (field.expand(batch, -1) if isinstance(field, Tensor) else field for field in materialized)
            return TokenPositions(*fields)  # type: ignore[arg-type]
        part_ids = self.summary_tokens.part_ids_of(text)
        # -1 for every token of a text without parts
        part_ids = part_ids_of(text) if part_ids is None else part_ids
        if max_parts is not None and isinstance(self.summary_tokens, PartSummaries):
            summaries = self.summary_tokens.list_at_most(max_parts, text.segment_ids, part_ids)
        else:
            summaries = self._list_summaries(text, part_ids)
        summary_segments, summary_positions, summary_parts = summaries
        return TokenPositions(
            torch.cat([summary_positions, text.position_ids.expand(batch, -1)], 1),
            torch.cat([summary_segments, text.segment_ids.expand(batch, -1)], 1),
            PrefixedLayout(summary_positions.shape[1]),
            None,
            torch.cat([torch.full_like(summary_positions, SUMMARY_ROLE), roles_of(text).expand(batch, -1)], 1),
            torch.cat([summary_parts, part_ids.expand(batch, -1)], 1),
        )

    # the number of summaries depends on tensor values
    @compiler_disabled
    def _list_summaries(self, text: TokenPositions, part_ids: Int[Tensor, "b l"]) -> Int[Tensor, "3 b n"]:
        layout = text.layout
        segment_ids = text.segment_ids
        row_ids = None
        if isinstance(layout, PackedLayout):
            row_ids = layout.ids_of_rows(len(segment_ids))
        rows = []
        if row_ids is not None and isinstance(self.summary_tokens, LeadingSummaries):
            # the documents of a row are known, and their summaries do not depend on parts
            for ids in row_ids:
                documents = torch.tensor(ids, dtype=torch.long, device="cpu")
                rows.append(self.summary_tokens.list_summaries(documents, torch.zeros_like(documents)))
        else:
            for row_segments, row_parts in zip(segment_ids.cpu(), part_ids.cpu()):
                valid = row_segments != PADDING_SEGMENT
                rows.append(self.summary_tokens.list_summaries(row_segments[valid], row_parts[valid]))
        padding = torch.tensor([PADDING_SEGMENT, 0, -1], device="cpu")
        # torch pads with zeros: shifted by the padding before, and back after it
        padded = pad_sequence([row - padding for row in rows], batch_first=True) + padding
        return send(padded.movedim(-1, 0), segment_ids.device)
