"""Errors caused by user input, one sentence each; the command line prints the bare message and exits with 2."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """An error in the user's input: the message names the value and says what would be right."""


class UserErrors(UserError):
    """Several input errors reported together, one line each."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = list(lines)
        super().__init__("\n".join(self.lines))


class TrainingInterrupted(UserError):
    """The run was stopped by a signal after saving and can be resumed; the command line exits with 130."""


def suggest_names(name: str, valid_names: Iterable[str]) -> str:
    """The end of an error message about an unknown `name`: the most similar valid names, or all if none is similar."""
    names = sorted(valid_names)
    matches = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if matches:
        return f"did you mean {' or '.join(matches)}?"
    return f"known: {', '.join(names)}"


class NonFiniteWeights(UserWarning):
    """Weights that were read are NaN or infinite, so that what the model computes is no number."""
