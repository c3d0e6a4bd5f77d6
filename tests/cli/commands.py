"""What the tests of the command line share besides fixtures."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from manyformer.cli import run

TEXT = "the cat sat on the mat and the dog lay by the door; one day the cat saw the dog and ran up the tree\n" * 120


class Ended(NamedTuple):
    """How a command ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str


Cli = Callable[..., Ended]
"""The fixture `cli`: words in, how it ended out."""


def train(folder: Path, *words: str) -> Path:
    """A run trained quietly in `folder`."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert run(["train", *words, "--quiet"]) == 0
    finally:
        os.chdir(before)
    return folder / "runs" / words[0]


TINY = ("dim=32", "depth=1", "heads=2", "limits.steps=30", "evaluate.every=15", "save.every=15", "batch.tokens=256")


def pairs(number: int) -> list[tuple[str, str]]:
    """Words and their letters the other way round."""
    words = ["red", "tan", "sun", "box", "cup", "fig", "map", "net", "oak", "pen", "rod", "sky"]
    actual = [(f"{a} {b} {c}", f"{a} {b} {c}"[::-1]) for a in words for b in words for c in words]
    return actual[:: max(1, len(actual) // number)][:number]


def sentences(number: int) -> str:
    """Sentences of a subject, a verb and an object in CoNLL-U, numbered by name."""
    nouns, verbs = ["cats", "dogs", "birds", "mice"], ["see", "hear", "like"]
    actual = []
    for count in range(number):
        subject, verb, thing = nouns[count % 4], verbs[count % 3], nouns[count // 12 % 4]
        rows = [(subject, "NOUN", 2, "nsubj"), (verb, "VERB", 0, "root"), (thing, "NOUN", 2, "obj")]
        words = [f"{n}\t{w}\t_\t{tag}\t_\t_\t{head}\t{rel}\t_\t_" for n, (w, tag, head, rel) in enumerate(rows, 1)]
        actual.append("\n".join([f"# sent_id = s{count}", *words]) + "\n")
    return "\n".join(actual)


def lines(text: str) -> Sequence[str]:
    """The lines that say something."""
    return [line for line in text.splitlines() if line.strip()]
