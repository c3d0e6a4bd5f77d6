"""Data as training, scoring and generation see it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from manyformer.data.levels import Levels
from manyformer.data.plan import Held
from manyformer.data.sampler import Sampler
from manyformer.data.saved import Tokenizers
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError


class Span(NamedTuple):
    """The longest sequence of a split, and what to say where a model does not allow it."""

    length: int
    what: str
    mend: str


class Example(NamedTuple):
    """A held-out pair (or text and label) as it was read, and where it stands."""

    source: str
    target: str
    where: str


@final
@dataclass(frozen=True)
class Data:
    """One data set, opened: batches for training and held-out ones, and what a model has to know of it."""

    task: str
    tokenizers: Tokenizers
    train: Sampler
    valid: Held
    test: Held | None
    lines: tuple[str, ...]
    spans: tuple[Span, ...]
    cache: Path

    @property
    def source(self) -> Tokenizer:
        """The tokenizer of what goes in."""
        return self.tokenizers.source

    @property
    def target(self) -> Tokenizer:
        """The tokenizer of what comes out: the same object as `source` where the vocabulary is shared."""
        return self.tokenizers.target

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The classes of a classification by their numbers, else None."""
        return self.tokenizers.labels

    @property
    def vocab(self) -> int:
        """The size of the vocabulary that the model predicts."""
        return self.target.vocab

    @property
    def needs(self) -> dict[str, Any]:
        """The model keywords that the data determines, all of which the model must have."""
        found: dict[str, Any] = {} if self.task == "image-classification" else {"vocab": self.vocab}
        if self.source is not self.target:
            found["source_vocab"] = self.source.vocab
        if self.labels is not None and self.task != "language-model":
            found["classes"] = len(self.labels)
        return found

    @property
    def offers(self) -> dict[str, int]:
        """Model keywords that the data determines where a model has them: the size of images, the blocks of them."""
        if not isinstance(self.source, Levels):
            return {}
        rows, columns = self.source.block
        blocks = {"rows": rows, "columns": columns} if self.task == "language-model" else {}
        return self.source.shape._asdict() | blocks

    def describe(self) -> list[str]:
        """For people: what it is, how much of it, and where it is from."""
        return list(self.lines)

    def check_length(self, longest: int | None) -> None:
        """UserError where a sequence is longer than the `longest` that the model allows (None: any length)."""
        for span in self.spans:
            if longest is not None and span.length > longest:
                raise UserError(f"{span.what} has {span.length} tokens, but the model allows {longest}; {span.mend}")

    def examples(self, split: str) -> Iterator[Example]:
        """The held-out pairs or labelled texts ("valid" or "test") as they were read, in the order they were read."""
        return read_examples(self.cache, split)

    def save(self, folder: str | Path) -> None:
        """Writes what using the model takes (tokenizers, labels); `load_tokenizers` reads it."""
        self.tokenizers.save(Path(folder))


def read_examples(cache: Path, split: str) -> Iterator[Example]:
    """The held-out rows that preparing wrote down."""
    with (cache / f"{split}.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield Example(*json.loads(line))


def amount(number: float, unit: str) -> str:
    """A quantity for people: "11.1 M characters"."""
    for size, sign in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if number >= size:
            # Ten thousand and more in thousands, so that 1,014 stays exact.
            scale = 1e3 if sign == " k" else size
            return f"{number / scale:.1f}{sign} {unit}"
    return f"{number:,} {unit}"
