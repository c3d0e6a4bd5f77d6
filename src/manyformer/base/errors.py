"""Errors caused by user input, one sentence each; the command line prints the bare message and exits with 2."""

import difflib
from collections.abc import Iterable
from typing import Any


class UserError(ValueError):
    """An error in the user's input: the message names the value and says what would be right."""


MAX_LINES = 20
"""So many errors are told at once; of more, the number alone."""

MAX_NAMES = 40
"""So many names stand in one list of an error."""


class UserErrors(UserError):
    """Several input errors reported together, one line each; those beyond `MAX_LINES` are counted."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)
        omitted = len(self.lines) - MAX_LINES
        # a note in the place of a single line would say less than the line
        if omitted > 1:
            notes = [f"and {omitted:,} more errors"]
        else:
            notes = self.lines[MAX_LINES:]
        super().__init__("\n".join([*self.lines[:MAX_LINES], *notes]))


class TrainingInterrupted(UserError):
    """The run was stopped by a signal after saving and can be resumed; the command line exits with 130."""


def list_names(names: Iterable[str]) -> str:
    """Names of a file or folder, which may have very many, with commas; those beyond `MAX_NAMES` are counted."""
    texts = list(names)
    omitted = len(texts) - MAX_NAMES
    return ", ".join(texts[:MAX_NAMES]) + (f" and {omitted:,} more" if omitted > 0 else "")


def suggest_names(name: str, valid_names: Iterable[str]) -> str:
    """The end of an error message about an unknown `name`: the most similar valid names, or all if none is similar."""
    names = sorted(valid_names)
    matches = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if matches:
        return f"did you mean {' or '.join(matches)}?"
    return f"known: {', '.join(names)}"


def format_value(value: Any) -> str:
    """A value in an error message: short, on one line, in YAML's form."""
    if isinstance(value, dict):
        if value:
            return "a mapping"
        return "an empty mapping"
    # as a run file has them
    constants: dict[Any, str] = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return constants[value]
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(format_value, value))}]"
    else:
        text = repr(value)
    if len(text) <= 60:
        return text
    return text[:57] + "..."


class NonFiniteWeights(UserWarning):
    """Weights that were read are NaN or infinite, so that what the model computes is no number."""
