"""Settings of rules whose sequences are chains, cycles, copies, pointers and sums."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from manyformer.config.data_sections.synthetic_section import SyntheticData, register_rule_section
from manyformer.config.section import PositiveInt, SettingConflict


class SymbolsData(SyntheticData):
    """Sequences of a rule over an alphabet of any size."""

    symbols: Annotated[int, Field(ge=4)] = 12
    """Size of the alphabet."""

    @property
    def alphabet(self) -> int:
        return self.symbols


@register_rule_section
class MarkovData(SymbolsData):
    """A Markov chain of order two: each pair of symbols has four possible successors."""

    rule: Literal["markov"] = "markov"
    """A Markov chain: each pair of symbols has four possible successors, with probabilities 0.7, 0.15, 0.1, 0.05; the
    best possible loss is 0.914 nats a symbol."""


@register_rule_section
class PeriodicData(SymbolsData):
    """Random symbols, repeated: each equals the symbol `period` positions back."""

    rule: Literal["periodic"] = "periodic"
    """`period` random symbols, repeated."""
    period: PositiveInt = 24
    """The number of symbols that are repeated."""


@register_rule_section
class MarkedData(SymbolsData):
    """Random symbols, of which one at the beginning is marked and must be predicted at the end."""

    rule: Literal["marked"] = "marked"
    """One of the first eight symbols is marked and must be predicted at the last eight positions."""


@register_rule_section
class DuplicateData(SymbolsData):
    """A mark and a random string, both twice (Kitaev et al. 2020, section 4)."""

    rule: Literal["duplicate"] = "duplicate"
    """A mark and a random string, both twice; only the second copy of the string is scored."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.length % 2 or self.length < 4:
            message = "must be even, and at least 4, for rows of two equal halves"
            yield SettingConflict(("length",), message, ("data.rule",))


@register_rule_section
class HopsData(SymbolsData):
    """Nodes that point at nodes, then questions about the node at the end of some hops."""

    rule: Literal["hops"] = "hops"
    """One pointer for each node, in any order, then questions about the node reached from a node in some hops."""
    symbols: Annotated[int, Field(ge=4)] = 12
    """The number of nodes."""
    hops: PositiveInt = 3
    """The largest number of hops in a question."""
    num_hops: PositiveInt | None = None
    """The number of hops of all questions; null means 1 to `hops`."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "num_hops")

    @property
    def alphabet(self) -> int:
        return self.symbols**2 + self.hops * self.symbols

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.length <= self.symbols:
            message = "must be above data.symbols: all nodes come before the questions"
            yield SettingConflict(("length",), message, ("data.rule",))
        elif self.num_hops is not None and self.num_hops > self.hops:
            yield SettingConflict(("num_hops",), "must be at most data.hops", ("data.hops",))


@register_rule_section
class AdditionData(SyntheticData):
    """Two binary numbers and the bits of their sum (Dehghani et al. 2019, section 3.3)."""

    rule: Literal["addition"] = "addition"
    """Two numbers of up to `digits` bits, lowest bit first, at a random offset; each token holds a bit of both, and the
    bits of their sum are scored."""
    symbols: Annotated[int, Field(ge=4, le=4)] = 4
    """The pairs of two bits."""
    digits: PositiveInt = 16
    """The largest length of the numbers, in bits."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "digits")

    @property
    def alphabet(self) -> int:
        return self.symbols

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.digits > self.sequence_length:
            message = "must be at most data.length: the numbers are in one row"
            yield SettingConflict(("digits",), message, ("data.length",))
