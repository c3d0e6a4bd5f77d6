"""What a regular expression of a tokenizer costs: whether it can match nothing, and whether it repeats repetitions."""

from typing import NamedTuple

MAX_PATTERN = 20_000
"""The longest pattern; those of known tokenizers have fewer than 2,000 characters."""

MAX_DEPTH = 100
"""How deep groups may be nested."""

MANY = 16
"""From this number of repetitions on, a repetition of repetitions counts as one without a bound."""

ZERO_WIDTH_ESCAPES = frozenset("bBAzZGKyY")
LOOKAROUNDS = ("?=", "?!", "?<=", "?<!")


class CostlyPattern(ValueError):
    """Why a pattern is not used."""


class PatternPart(NamedTuple):
    """A part of a pattern: the fewest characters that it matches, whether it repeats a part many times in more than
    one way, and what it begins with ("" for nothing)."""

    width: int
    repeats: bool = False
    first: str = ""


def pattern_width(pattern: str) -> int:
    """The fewest characters that a pattern of Oniguruma matches.

    Raises CostlyPattern for one that repeats what itself repeats, as (a+)+ does: on some texts the time of such a
    pattern doubles with each character."""
    if len(pattern) > MAX_PATTERN:
        raise CostlyPattern(f"has {len(pattern):,} characters, which is too much for a pattern")
    return _PatternReader(pattern).alternatives(0).width


class _PatternReader:
    """Reads a pattern from left to right; what it does not understand counts as characters."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.place = 0

    def alternatives(self, depth: int) -> PatternPart:
        """Everything up to the end of a group."""
        if depth > MAX_DEPTH:
            raise CostlyPattern(f"nests groups more than {MAX_DEPTH} deep")
        branches = [self._sequence(depth)]
        while self._take("|"):
            branches.append(self._sequence(depth))
        firsts = [branch.first for branch in branches]
        # two ways to read the same characters, which a repetition multiplies
        is_ambiguous = len(branches) > 1 and (len(set(firsts)) < len(firsts) or "." in firsts)
        width = min(branch.width for branch in branches)
        return PatternPart(width, is_ambiguous or any(branch.repeats for branch in branches), firsts[0])

    def _sequence(self, depth: int) -> PatternPart:
        width = 0
        repeats = False
        first = ""
        while self.place < len(self.pattern) and self.pattern[self.place] not in "|)":
            part = self._quantified(self._atom(depth))
            width = width + part.width
            repeats = repeats or part.repeats
            first = first or part.first
        return PatternPart(width, repeats, first)

    def _quantified(self, part: PatternPart) -> PatternPart:
        """A part with all quantifiers that follow it."""
        while (bounds := self._bounds()) is not None:
            lowest, highest = bounds
            is_possessive = self._take("+")
            if not is_possessive:
                self._take("?")
            is_many = highest is None or highest >= MANY
            if is_many and part.repeats:
                raise CostlyPattern("repeats a part that repeats itself, or that can be read in two ways")
            repeats = (is_many and highest != lowest) or part.repeats
            part = PatternPart(part.width * lowest, repeats and not is_possessive, part.first)
        return part

    def _bounds(self) -> tuple[int, int | None] | None:
        """The numbers of a quantifier at this place, None if there is none."""
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        end = self.pattern.find("}", self.place)
        if end < 0 or not self.pattern.startswith("{", self.place):
            return None
        lowest, comma, highest = self.pattern[self.place + 1 : end].partition(",")
        if not (lowest.isdecimal() or (comma and highest)) or not (highest.isdecimal() or not highest):
            return None
        self.place = end + 1
        # {,n} begins at 0, {n} is exactly n
        low = int(lowest or 0)
        return low, (int(highest) if highest else None) if comma else low

    def _atom(self, depth: int) -> PatternPart:
        sign = self.pattern[self.place]
        start = self.place
        self.place += 1
        if sign == "(":
            return self._group(depth)
        if sign == "[":
            self._skip_class()
            return PatternPart(1, first=self.pattern[start : self.place])
        if sign == "\\":
            return self._escape(start)
        if sign in "^$":
            return PatternPart(0)
        return PatternPart(1, first=sign)

    def _group(self, depth: int) -> PatternPart:
        # enough to tell all kinds of groups apart
        rest = self.pattern[self.place : self.place + 3]
        if rest.startswith("?#"):
            self.place = self._after(")")
            return PatternPart(0)
        if rest.startswith("?") and not rest.startswith(("?:", "?>", "?~", *LOOKAROUNDS)):
            # a name, or options such as (?i) and (?i:
            ends = [end for mark in ">:)" if (end := self.pattern.find(mark, self.place)) >= 0]
            self.place = min(ends, default=len(self.pattern) - 1) + 1
            if self.pattern[self.place - 1] == ")":
                return PatternPart(0)
        elif rest.startswith("?"):
            self.place += 3 if rest.startswith("?<") else 2
        inner = self.alternatives(depth + 1)
        self._take(")")
        if rest.startswith(LOOKAROUNDS):
            return PatternPart(0)
        if rest.startswith("?~"):
            # the absent operator (?~X) tries every length
            return PatternPart(0, repeats=True)
        if rest.startswith("?>"):
            return inner._replace(repeats=False)
        return inner

    def _escape(self, start: int) -> PatternPart:
        sign = self.pattern[self.place : self.place + 1]
        self.place += 1
        if sign in ("k", "g") and self.pattern.startswith("<", self.place):
            if sign == "g":
                raise CostlyPattern("calls a group of its own")
            self.place = self._after(">")
            return PatternPart(0)
        if sign and sign in "pPxuo" and self.pattern.startswith("{", self.place):
            self.place = self._after("}")
        elif sign.isdecimal() and sign != "0":
            return PatternPart(0)
        if sign in ZERO_WIDTH_ESCAPES:
            return PatternPart(0)
        return PatternPart(1, first=self.pattern[start : self.place])

    def _skip_class(self) -> None:
        """Go behind the end of a class of characters, which may contain others."""
        self._take("^")
        # directly after the bracket it is a character of the class
        self._take("]")
        open_classes = 1
        while open_classes and self.place < len(self.pattern):
            sign = self.pattern[self.place]
            self.place += 2 if sign == "\\" else 1
            open_classes += (sign == "[") - (sign == "]")

    def _after(self, mark: str) -> int:
        end = self.pattern.find(mark, self.place)
        if end < 0:
            return len(self.pattern)
        return end + 1

    def _take(self, mark: str) -> bool:
        is_next = self.pattern.startswith(mark, self.place)
        self.place += len(mark) * is_next
        return is_next
