"""Settings of rules whose answers follow from a state that every token changes: groups."""

from collections.abc import Iterator
from typing import ClassVar, Literal

from manyformer.config.data_sections.synthetic_section import AtLeastTwo, SyntheticData, register_rule_section
from manyformer.config.section import SettingConflict

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
