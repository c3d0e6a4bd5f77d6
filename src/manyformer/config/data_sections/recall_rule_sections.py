"""Settings of rules whose answers stand in the sequence: recall of values by their keys, a needle, copies."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from manyformer.config.data_sections.synthetic_section import AtLeastTwo, SyntheticData, register_rule_section
from manyformer.config.section import PositiveFloat, PositiveInt, SettingConflict, accepted_forms

Depth = Annotated[float, Field(ge=0, le=1)]
PairCounts = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, ...], Field(min_length=1)],
    accepted_forms("a whole number or a list of whole numbers, each greater than 0"),
]


@register_rule_section
class MQARData(SyntheticData):
    """Multi-query associative recall: pairs of a key and a value, then each key once more, whose value is predicted
    (Arora et al. 2023, "Zoology", section 3)."""

    rule: Literal["mqar"] = "mqar"
    """Pairs of a key and a value, then random tokens among which each key stands once more; its value is predicted."""
    symbols: Annotated[PositiveInt, Field(ge=6)] = 8192
    """Size of the alphabet: symbols 1 to n/2 - 1 are keys, n/2 to n - 1 are values."""
    pairs: PairCounts = 4
    """Number of pairs, at most a quarter of the length; of a list, each row has one of these numbers."""
    power: PositiveFloat = 0.01
    """The distance of a query from the pairs is drawn with a probability proportional to distance^(power - 1); 1 is a
    uniform distribution."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "pairs", "power")

    @property
    def alphabet(self) -> int:
        return self.symbols

    @property
    def pair_counts(self) -> tuple[int, ...]:
        """The numbers of pairs that a row may have."""
        if isinstance(self.pairs, int):
            return (self.pairs,)
        return self.pairs

    def conflicts(self) -> Iterator[SettingConflict]:
        largest = max(self.pair_counts)
        if self.sequence_length % 2:
            yield SettingConflict(("length",), "must be even: pairs have two tokens", ("data.rule",))
        if 4 * largest > self.sequence_length:
            message = f"must be at most data.length / 4: {largest} pairs and as many queries need twice their length"
            yield SettingConflict(("pairs",), message, ("data.length",))
        if largest > self.symbols // 2 - 1:
            message = f"must be at least {2 * largest + 2}: {largest} pairs have keys that differ"
            yield SettingConflict(("symbols",), message, ("data.pairs",))


@register_rule_section
class NeedleData(SyntheticData):
    """A needle in random tokens: a key and its value at some depth, and the key again at the end."""

    rule: Literal["needle"] = "needle"
    """Random tokens with a key and its value among them; the last is the key again, whose value is predicted."""
    noise: PositiveInt = 64
    """Number of symbols that the random tokens are drawn from; none of them is a key or a value."""
    keys: PositiveInt = 16
    """Number of symbols that are keys."""
    values: AtLeastTwo = 16
    """Number of symbols that are values."""
    needles: PositiveInt = 1
    """Number of keys with a value in a row, one of which is asked for."""
    depth: Depth | None = None
    """Where the needle that is asked for stands: 0 is the beginning, 1 directly before the question; null means
    anywhere."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "needles", "depth")

    @property
    def alphabet(self) -> int:
        return self.noise + self.keys + self.values

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.needles > self.keys:
            yield SettingConflict(("needles",), "must be at most data.keys: their keys differ", ("data.keys",))
        if self.sequence_length < 2 * self.needles + 1:
            message = f"must be at least {2 * self.needles + 1}: a needle has two tokens, the question one"
            yield SettingConflict(("length",), message, ("data.needles",))


@register_rule_section
class CopyData(SyntheticData):
    """A random string, a mark, and the string again, or reversed, or sorted (Jelassi et al. 2024, section 3)."""

    rule: Literal["copy"] = "copy"
    """A random string, a mark, and the string again, which is scored with the end mark that follows."""
    symbols: AtLeastTwo = 26
    """Number of symbols that strings are made of; two marks come on top."""
    order: Literal["same", "reversed", "sorted"] = "same"
    """The order of the symbols in the answer."""
    min_string: PositiveInt | None = None
    """Length of the shortest string; null means that all have the largest length that fits, (data.length - 1) / 2."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "min_string")

    @property
    def alphabet(self) -> int:
        return self.symbols + 2

    @property
    def max_string(self) -> int:
        """Length of the longest string: it stands in a row twice, with a mark between."""
        return (self.sequence_length - 1) // 2

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.max_string < 1:
            yield SettingConflict(("length",), "must be at least 3: a symbol, a mark, the symbol")
        elif self.min_string is not None and self.min_string > self.max_string:
            message = f"must be at most {self.max_string}, the longest string that fits in a row twice"
            yield SettingConflict(("min_string",), message, ("data.length",))
