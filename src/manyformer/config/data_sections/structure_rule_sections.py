"""Settings of rules whose answers follow from a structure: groups, nested lists, automata, drawn paths."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from manyformer.config.data_sections.synthetic_section import AtLeastTwo, SyntheticData, register_rule_section
from manyformer.config.section import NonNegativeInt, PositiveInt, SettingConflict

GROUP_SIZES = {"parity": 2, "S3": 6, "A5": 60, "S5": 120}
"""The number of elements of each group whose size is fixed."""


@register_rule_section
class StateTrackingData(SyntheticData):
    """Word problems of groups: each token is an element, and the product of all so far is predicted (Merrill et al.
    2024, section 5)."""

    rule: Literal["state-tracking"] = "state-tracking"
    """Elements of a group; at each token the product of all elements so far is predicted."""
    group: Literal["parity", "modular", "S3", "A5", "S5"] = "parity"
    """The group: parity is {0, 1} with the sum modulo 2, modular the numbers below `modulus` with their sum, S3 and S5
    all permutations of 3 and 5 items, A5 the even ones of 5."""
    modulus: AtLeastTwo | None = None
    """Only for modular, which needs it: the number of states."""
    scored: Literal["all", "last"] = "all"
    """The positions whose product is predicted: all, or the last of a row alone."""

    swept: ClassVar[tuple[str, ...]] = ("length", "context", "scored")

    @property
    def alphabet(self) -> int:
        if self.modulus is not None:
            return self.modulus
        return GROUP_SIZES[self.group]

    @property
    def classes(self) -> int | None:
        return self.alphabet

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.group == "modular" and self.modulus is None:
            yield SettingConflict(("modulus",), "is needed: the number of states of modular", ("data.group",))
        if self.group != "modular" and self.modulus is not None:
            yield SettingConflict(("modulus",), f"is for modular, and {self.group} has none", ("data.group",))


@register_rule_section
class ListOpsData(SyntheticData):
    """Nested operations on lists of digits (Nangia and Bowman 2018), drawn as in the Long Range Arena (Tay et al. 2021,
    section 2.2)."""

    rule: Literal["listops"] = "listops"
    """Nested minima, maxima, medians and sums modulo 10 of digits; the value of the expression is predicted at its last
    token."""
    length: PositiveInt = 2000
    """Columns of a row; expressions have fewer tokens."""
    min_tokens: NonNegativeInt = 500
    """Expressions have more tokens than that."""
    depth: AtLeastTwo = 10
    """The largest depth of an expression, in which digits count as well."""
    max_args: AtLeastTwo = 10
    """The most arguments of an operation; the fewest are 2."""

    swept: ClassVar[tuple[str, ...]] = ("length", "min_tokens", "depth", "max_args")

    @property
    def alphabet(self) -> int:
        # ten digits, four operations, and the bracket that closes them
        return 15

    @property
    def classes(self) -> int | None:
        # the digits, which are the first symbols
        return 10

    def conflicts(self) -> Iterator[SettingConflict]:
        yield from super().conflicts()
        if self.min_tokens >= self.sequence_length - 2:
            message = "must be below data.length - 2: expressions have more tokens than that, and fewer than a row"
            yield SettingConflict(("min_tokens",), message, ("data.length",))
        largest = 1
        for _ in range(self.depth - 1):
            # an operation, its arguments and the closing bracket; bounded, because the depth may be any number
            largest = min(2 + self.max_args * largest, 1 << 62)
        if largest <= self.min_tokens:
            message = f"must be below {largest}, the tokens of the longest expression of depth {self.depth}"
            yield SettingConflict(("min_tokens",), message, ("data.depth", "data.max_args"))


@register_rule_section
class RegularLanguageData(SyntheticData):
    """Strings of a random automaton, another one for each row (RegBench, Akyurek et al. 2024, section 3)."""

    rule: Literal["regular-language"] = "regular-language"
    """Strings of a random automaton, which is another one in each row, with a mark after each; each next symbol is
    predicted."""
    length: PositiveInt = 512
    """Tokens in a row."""
    symbols: AtLeastTwo = 18
    """Number of symbols that strings are made of; the mark comes on top."""
    min_states: AtLeastTwo = 4
    """The fewest states of an automaton."""
    max_states: AtLeastTwo = 12
    """The most states of an automaton."""
    edges: PositiveInt = 4
    """The most symbols that may follow in a state; the fewest are 1, all are equally likely and lead to different
    states."""
    max_string: PositiveInt = 50
    """Length of the longest string; the shortest has 1 symbol."""
    scored: Literal["all", "forced"] = "all"
    """The next symbols that are predicted: all, or those alone that are the only possible ones, from a state that has
    been left before in the row."""

    swept: ClassVar[tuple[str, ...]] = (
        "length",
        "context",
        "min_states",
        "max_states",
        "edges",
        "max_string",
        "scored",
    )

    @property
    def alphabet(self) -> int:
        return self.symbols + 1

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.min_states > self.max_states:
            yield SettingConflict(("min_states",), "must be at most data.max_states", ("data.max_states",))
        if self.edges > min(self.symbols, self.max_states - 1):
            message = "must be at most data.symbols, and below data.max_states: the symbols and their states differ"
            yield SettingConflict(("edges",), message, ("data.symbols", "data.max_states"))


@register_rule_section
class PathfinderData(SyntheticData):
    """Two disks and dashed paths: does a path lead from one disk to the other (Linsley et al. 2018, section 2)?"""

    rule: Literal["pathfinder"] = "pathfinder"
    """Pixels of an image with two disks, two long dashed paths and shorter ones; whether a path connects the disks is
    predicted at the last pixel."""
    size: Annotated[PositiveInt, Field(ge=16, le=256)] = 32
    """Height and width of the images."""
    length: PositiveInt = 1024
    """Tokens in a row: size x size pixels, row by row."""
    levels: Annotated[PositiveInt, Field(ge=2, le=256)] = 16
    """Number of brightness levels."""
    dashes: AtLeastTwo = 6
    """Dashes of each of the two paths; 6, 9 and 14 in the paper."""
    distractors: NonNegativeInt = 6
    """The most shorter paths, of a third of the dashes, of which those are drawn that find a place."""

    swept: ClassVar[tuple[str, ...]] = ("dashes", "distractors")

    @classmethod
    def fill(cls, settings: dict[str, Any]) -> dict[str, Any]:
        size = settings.get("size", 32)
        if isinstance(size, int) and size < 1 << 16:
            return {"length": size * size, **settings}
        return settings

    @property
    def alphabet(self) -> int:
        return self.levels

    @property
    def classes(self) -> int | None:
        return 2

    def conflicts(self) -> Iterator[SettingConflict]:
        yield from super().conflicts()
        if self.sequence_length != self.size**2:
            message = f"must be {self.size**2}: the pixels of an image of {self.size} x {self.size}"
            yield SettingConflict(("length",), message, ("data.size",))
        if self.dashes > self.size:
            message = f"must be at most {self.size}: longer paths find no place in the image"
            yield SettingConflict(("dashes",), message, ("data.size",))
