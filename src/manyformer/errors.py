"""Mistakes that a user can mend, told in one sentence; the command line prints them bare and exits with 2."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake in what the user gave: the message names the value and says what would be right."""


class UserErrors(UserError):
    """Several mistakes found together, one line each."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown `word`: the nearest known one, or all of them when none is near."""
    names = sorted(known)
    near = difflib.get_close_matches(word, names, n=3, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(names)}"
