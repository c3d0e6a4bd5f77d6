"""Global tokens that stand before a text and gather what it says (Ainslie et al. 2020; Zaheer et al. 2020, "ETC")."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from manyformer.core import PADDING, SUMMARY, Context, Fronted, Layer, Out, Place, Plain, State
from manyformer.masks.base import part_of, role_of
from manyformer.ops.spelled import marked, spell


class Summaries(ABC):
    """Which summaries a document has."""

    kinds: int
    """How many differ before they have seen anything."""
    across: Literal[1, 2]
    """Whether a token may belong to one of them."""

    @abstractmethod
    def layout(self, length: int) -> Fronted:
        """What stands before one whole document of `length` tokens."""

    @abstractmethod
    def parts(self, place: Place) -> Int[Tensor, "b l"] | None:
        """The part that each token belongs to, if there are parts."""

    @abstractmethod
    def listed(self, seg: Int[Tensor, " l"], part: Int[Tensor, " l"]) -> Int[Tensor, "n 3"]:
        """Segment, position and part of the summaries of one row, whose real tokens are given."""


@final
@dataclass(frozen=True)
class EachPart(Summaries):
    """One for each part of a document; parts are `stretch` tokens long where nobody says what they are."""

    stretch: int
    kinds = 1
    across = 2

    def __post_init__(self) -> None:
        if self.stretch < 1:
            raise ValueError(f"EachPart: a part has at least one token, not {self.stretch}")

    def layout(self, length: int) -> Fronted:
        return Fronted(-(-length // self.stretch), Plain(), self.stretch)

    def parts(self, place: Place) -> Int[Tensor, "b l"]:
        return place.pos // self.stretch if place.part is None else place.part

    def listed(self, seg: Int[Tensor, " l"], part: Int[Tensor, " l"]) -> Int[Tensor, "n 3"]:
        pairs = torch.stack([seg, part, part], -1)[part >= 0]
        found: Tensor = torch.unique(pairs, dim=0)
        return found


@final
@dataclass(frozen=True)
class Leading(Summaries):
    """`count` of them before each document, of no part, each with a vector of its own."""

    count: int
    across = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"Leading: there must be at least one summary, not {self.count}")

    @property
    def kinds(self) -> int:  # type: ignore[override]
        return self.count

    def layout(self, length: int) -> Fronted:
        return Fronted(self.count, Plain())

    def parts(self, place: Place) -> None:
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


class Both(NamedTuple):
    """What came of summaries and of the text, and where the summaries stand."""

    summaries: Float[Tensor, "b n d"]
    text: Out
    place: Place


@final
class Summarised(Layer):
    """`inner` over a text with its summaries before it; only the text goes on.

    Summaries have the role `SUMMARY`, so that masks and positions of `inner` can tell them from the text. It sees both
    sides, so it keeps no state.
    """

    def __init__(self, inner: Layer, dim: int, summaries: Summaries) -> None:
        super().__init__()
        self.inner, self.kinds = inner, summaries
        # tokens come in normed
        self.vectors = nn.Parameter(torch.randn(summaries.kinds, dim))

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        if state:
            raise ValueError("Summarised sees both sides of every token: it cannot go on from a state")
        return self.both(x, ctx).text

    def both(self, x: Float[Tensor, "b l d"], ctx: Context) -> Both:
        """Summaries and text after `inner`."""
        place = self.place(ctx.place, x.shape[0])
        assert isinstance(place.layout, Fronted)
        front = place.layout.front
        first = self.vectors[place.pos[:, :front] % len(self.vectors)]
        out = self.inner(torch.cat([first.to(x.dtype), x], 1), Context(place, ctx.memory, ctx.watch))
        summaries, text = torch.split(out.y, [front, x.shape[1]], 1)
        return Both(summaries, Out(text, None, out.loss), place.columns(0, front))

    def place(self, text: Place, batch: int) -> Place:
        """Where summaries and tokens are."""
        layout = self.kinds.layout(text.pos.shape[1])
        if isinstance(text.layout, Plain) and text.layout.start == 0 and not marked(text):
            whole = spell(layout, layout.front + text.pos.shape[1], text.pos.device)
            return Place(*(x.expand(batch, -1) if isinstance(x, Tensor) else x for x in whole))  # type: ignore[arg-type]
        part = self.kinds.parts(text)
        part = part_of(text) if part is None else part
        seg, pos, its = self._listed(text.seg, part)
        return Place(
            torch.cat([pos, text.pos.expand(batch, -1)], 1),
            torch.cat([seg, text.seg.expand(batch, -1)], 1),
            Fronted(pos.shape[1]),
            None,
            torch.cat([torch.full_like(pos, SUMMARY), role_of(text).expand(batch, -1)], 1),
            torch.cat([its, part.expand(batch, -1)], 1),
        )

    # how many there are depends on the numbers
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _listed(self, seg: Int[Tensor, "b l"], part: Int[Tensor, "b l"]) -> Int[Tensor, "3 b n"]:
        rows = [
            self.kinds.listed(numbers[numbers != PADDING], parts[numbers != PADDING])
            for numbers, parts in zip(seg.cpu(), part.cpu())
        ]
        empty = torch.tensor([PADDING, 0, -1])
        whole = pad_sequence([row - empty for row in rows], batch_first=True) + empty
        return whole.movedim(-1, 0).to(seg.device)
