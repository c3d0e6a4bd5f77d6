"""Settings of the six tasks of MAD, "mechanistic architecture design" (Poli et al. 2024, section 3)."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from manyformer.config.data_sections.synthetic_section import SyntheticData, register_rule_section
from manyformer.config.section import Fraction, PositiveInt, SettingConflict


class MADData(SyntheticData):
    """Settings that the tasks of MAD have in common."""

    symbols: Annotated[PositiveInt, Field(ge=6)] = 16
    """Size of the alphabet, with the marks that the task needs."""
    length: PositiveInt = 128
    """Tokens in a row."""

    @property
    def alphabet(self) -> int:
        return self.symbols


class InContextRecallData(MADData):
    """Settings of recall by keys of one token."""

    @property
    def noise_symbols(self) -> int:
        """The number of symbols of noise."""
        return 0

    @property
    def keys(self) -> int:
        """The number of keys: the first half of the symbols that are no noise, of which the others are values."""
        return (self.symbols - self.noise_symbols) // 2

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.sequence_length % 2 or self.sequence_length < 4:
            yield SettingConflict(("length",), "must be even, and at least 4: rows are pairs", ("data.rule",))


@register_rule_section
class MADRecallData(InContextRecallData):
    """In-context recall of MAD: pairs of a key and a value, which is predicted whenever the key came before."""

    rule: Literal["mad-recall"] = "mad-recall"
    """Pairs of a key and its value; the value is predicted at a key that came before."""


@register_rule_section
class MADNoisyRecallData(InContextRecallData):
    """Noisy in-context recall of MAD: some pairs are noise of other symbols."""

    rule: Literal["mad-noisy-recall"] = "mad-noisy-recall"
    """As mad-recall, with noise between the pairs."""
    symbols: Annotated[PositiveInt, Field(ge=6)] = 32
    """Size of the alphabet, with the symbols of noise."""
    noise: PositiveInt = 16
    """How many of the symbols are noise."""
    noise_share: Fraction = 0.2
    """The share of the pairs that are two symbols of noise instead."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "noise_share")

    @property
    def noise_symbols(self) -> int:
        return self.noise

    def conflicts(self) -> Iterator[SettingConflict]:
        yield from super().conflicts()
        if self.symbols - self.noise < 4:
            message = "must leave at least 4 symbols: two keys and two values"
            yield SettingConflict(("noise",), message, ("data.symbols",))


@register_rule_section
class MADFuzzyRecallData(MADData):
    """Fuzzy in-context recall of MAD: keys and values are several tokens, whose borders must be inferred."""

    rule: Literal["mad-fuzzy-recall"] = "mad-fuzzy-recall"
    """Keys and values of several tokens; a value is predicted, token by token, after a key that came before."""
    symbols: Annotated[PositiveInt, Field(ge=9)] = 16
    """Size of the alphabet, of which the last is padding at the left, and the others keys and values by halves."""
    key_length: PositiveInt = 3
    """The most tokens of a key."""
    min_key: PositiveInt = 1
    """The fewest tokens of a key; MAD trains with 1 and tests with `key_length`."""
    value_length: PositiveInt = 3
    """The most tokens of a value."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "min_key")

    def conflicts(self) -> Iterator[SettingConflict]:
        half = (self.symbols - 1) // 2
        if max(self.key_length, self.value_length) > half:
            message = f"must be at least {2 * max(self.key_length, self.value_length) + 1}: the tokens of a key differ"
            yield SettingConflict(("symbols",), message, ("data.key_length", "data.value_length"))
        if self.min_key > self.key_length:
            yield SettingConflict(("min_key",), "must be at most data.key_length", ("data.key_length",))
        if self.sequence_length < (needed := 4 * (self.key_length + self.value_length)):
            message = f"must be at least {needed}: four times the longest key and value"
            yield SettingConflict(("length",), message, ("data.key_length", "data.value_length"))


@register_rule_section
class MADCopyData(MADData):
    """Selective copying of MAD: symbols among blanks, which are predicted without the blanks."""

    rule: Literal["mad-copy"] = "mad-copy"
    """Symbols among blanks, a mark, then blanks at which the symbols are predicted in their order."""
    length: PositiveInt = 256
    """Tokens in a row."""
    copied: PositiveInt = 16
    """Number of symbols that are copied."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "copied")

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.sequence_length < 2 * self.copied + 1:
            message = f"must be at least {2 * self.copied + 1}: the symbols, a mark, and a blank for each"
            yield SettingConflict(("length",), message, ("data.copied",))


@register_rule_section
class MADCompressionData(MADData):
    """Compression of MAD, for causal models: symbols, a mark, then the position of each, at which it is predicted."""

    rule: Literal["mad-compression"] = "mad-compression"
    """Symbols and a mark, then numbers of positions in any order, at which the symbols there are predicted."""
    length: PositiveInt = 32
    """Tokens in a row: as many symbols as questions, and the mark between."""

    @property
    def compressed(self) -> int:
        """The number of symbols in a row."""
        # as many questions as symbols, and the mark between
        return (self.sequence_length - 1) // 2

    @property
    def alphabet(self) -> int:
        # each position is a symbol of its own, after the others
        return self.symbols + self.compressed

    swept: ClassVar[tuple[str, ...]] = ("context",)

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.compressed < 1:
            yield SettingConflict(("length",), "must be at least 3: a symbol, the mark, a question", ("data.rule",))


@register_rule_section
class MADMemorizationData(MADData):
    """Memorization of MAD: the value of each key is the same in all rows, and is to be learnt by heart."""

    rule: Literal["mad-memorization"] = "mad-memorization"
    """Keys, each followed by a mark at which its value is predicted; the values are the same in all rows."""
    symbols: Annotated[PositiveInt, Field(ge=6)] = 256
    """Size of the alphabet: as many keys as values, and the mark."""
    length: PositiveInt = 32
    """Tokens in a row."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.sequence_length % 2:
            yield SettingConflict(("length",), "must be even: each key is followed by a mark", ("data.rule",))
