"""Global tokens that stand before a text and gather what it says (Ainslie et al. 2020; Zaheer et al. 2020, "ETC")."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from manyformer.core import (
    PADDING_SEGMENT,
    SUMMARY_ROLE,
    Context,
    ContiguousLayout,
    Layer,
    LayerOutput,
    PrefixedLayout,
    State,
    TokenPositions,
)
from manyformer.masks.mask import part_of, role_of
from manyformer.ops.static_layout import has_roles_or_parts, materialize


class SummaryTokens(ABC):
    """Which summaries a document has."""

    kinds: int
    """How many differ before they have seen anything."""
    across: Literal[1, 2]
    """Whether a token may belong to one of them."""

    @abstractmethod
    def layout(self, length: int) -> PrefixedLayout:
        """What stands before one whole document of `length` tokens."""

    @abstractmethod
    def parts(self, positions: TokenPositions) -> Int[Tensor, "b l"] | None:
        """The part that each token belongs to, if there are parts."""

    @abstractmethod
    def listed(self, seg: Int[Tensor, " l"], part: Int[Tensor, " l"]) -> Int[Tensor, "n 3"]:
        """Segment, position and part of the summaries of one row, whose real tokens are given."""


@final
@dataclass(frozen=True)
class PartSummaries(SummaryTokens):
    """One for each part of a document; parts are `stretch` tokens long where nobody says what they are."""

    stretch: int
    kinds = 1
    across = 2

    def __post_init__(self) -> None:
        if self.stretch < 1:
            raise ValueError(f"PartSummaries: a part has at least one token, not {self.stretch}")

    def layout(self, length: int) -> PrefixedLayout:
        return PrefixedLayout(-(-length // self.stretch), ContiguousLayout(), self.stretch)

    def parts(self, positions: TokenPositions) -> Int[Tensor, "b l"]:
        return positions.position_ids // self.stretch if positions.part_ids is None else positions.part_ids

    def listed(self, seg: Int[Tensor, " l"], part: Int[Tensor, " l"]) -> Int[Tensor, "n 3"]:
        pairs = torch.stack([seg, part, part], -1)[part >= 0]
        found: Tensor = torch.unique(pairs, dim=0)
        return found


@final
@dataclass(frozen=True)
class LeadingSummaries(SummaryTokens):
    """`count` of them before each document, of no part, each with a vector of its own."""

    count: int
    across = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"LeadingSummaries: there must be at least one summary, not {self.count}")

    @property
    def kinds(self) -> int:  # type: ignore[override]
        return self.count

    def layout(self, length: int) -> PrefixedLayout:
        return PrefixedLayout(self.count, ContiguousLayout())

    def parts(self, positions: TokenPositions) -> None:
        return None

    def listed(self, seg: Int[Tensor, " l"], part: Int[Tensor, " l"]) -> Int[Tensor, "n 3"]:
        number = torch.arange(self.count)
        owner = torch.unique(seg)
        rows = [
            owner.repeat_interleave(self.count),
            number.repeat(len(owner)),
            torch.full((len(owner) * self.count,), -1),
        ]
        return torch.stack(rows, -1)


class SummaryAndText(NamedTuple):
    """What came of summaries and of the text, and where the summaries stand."""

    summaries: Float[Tensor, "b n d"]
    text: LayerOutput
    positions: TokenPositions


@final
class SummaryPrefixedLayer(Layer):
    """`inner` over a text with its summaries before it; only the text goes on.

    Summaries have the role `SUMMARY_ROLE`, so that masks and positions of `inner` can tell them from the text. It sees
    both sides, so it keeps no state."""

    def __init__(self, inner: Layer, dim: int, summaries: SummaryTokens) -> None:
        super().__init__()
        self.inner, self.kinds = inner, summaries
        # tokens come in normed
        self.vectors = nn.Parameter(torch.randn(summaries.kinds, dim))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state:
            raise ValueError("Summarised sees both sides of every token: it cannot go on from a state")
        return self.both(x, ctx).text

    def both(self, x: Float[Tensor, "b l d"], ctx: Context) -> SummaryAndText:
        """Summaries and text after `inner`."""
        place = self.place(ctx.positions, x.shape[0])
        assert isinstance(place.layout, PrefixedLayout)
        front = place.layout.prefix
        first = self.vectors[place.position_ids[:, :front] % len(self.vectors)]
        out = self.inner(torch.cat([first.to(x.dtype), x], 1), Context(place, ctx.memory, ctx.watch))
        summaries, text = torch.split(out.y, [front, x.shape[1]], 1)
        return SummaryAndText(summaries, LayerOutput(text, None, out.loss), place.columns(0, front))

    def place(self, text: TokenPositions, batch: int) -> TokenPositions:
        """Where summaries and tokens are."""
        layout = self.kinds.layout(text.position_ids.shape[1])
        if isinstance(text.layout, ContiguousLayout) and text.layout.start == 0 and not has_roles_or_parts(text):
            whole = materialize(layout, layout.prefix + text.position_ids.shape[1], text.position_ids.device)
            return TokenPositions(*(x.expand(batch, -1) if isinstance(x, Tensor) else x for x in whole))  # type: ignore[arg-type]
        part = self.kinds.parts(text)
        part = part_of(text) if part is None else part
        seg, pos, its = self._listed(text.segment_ids, part)
        return TokenPositions(
            torch.cat([pos, text.position_ids.expand(batch, -1)], 1),
            torch.cat([seg, text.segment_ids.expand(batch, -1)], 1),
            PrefixedLayout(pos.shape[1]),
            None,
            torch.cat([torch.full_like(pos, SUMMARY_ROLE), role_of(text).expand(batch, -1)], 1),
            torch.cat([its, part.expand(batch, -1)], 1),
        )

    # how many there are depends on the numbers
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _listed(self, seg: Int[Tensor, "b l"], part: Int[Tensor, "b l"]) -> Int[Tensor, "3 b n"]:
        rows = [
            self.kinds.listed(numbers[numbers != PADDING_SEGMENT], parts[numbers != PADDING_SEGMENT])
            for numbers, parts in zip(seg.cpu(), part.cpu())
        ]
        empty = torch.tensor([PADDING_SEGMENT, 0, -1])
        whole = pad_sequence([row - empty for row in rows], batch_first=True) + empty
        return whole.movedim(-1, 0).to(seg.device)
