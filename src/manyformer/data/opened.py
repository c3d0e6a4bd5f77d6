"""Data as training, scoring and generation see it."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

from manyformer.data.epochs import HeldOutBatches
from manyformer.data.pixel_tokenizer import PixelTokenizer
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError


class LengthLimit(NamedTuple):
    """The longest sequence of a split, and what to say where a model does not allow it."""

    length: int
    subject: str
    remedy: str


class HeldOutExample(NamedTuple):
    """A held-out pair (or text and label) as it was read, and where it stands."""

    source: str
    target: str
    where: str


@final
@dataclass(frozen=True)
class OpenedData:
    """One data set, opened: batches for training and held-out ones, and what a model has to know of it."""

    task: str
    tokenizers: TokenizerPair
    train: Sampler
    valid: HeldOutBatches
    test: HeldOutBatches | None
    lines: tuple[str, ...]
    spans: tuple[LengthLimit, ...]
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
    def required_keywords(self) -> dict[str, Any]:
        """The model keywords that the data determines, all of which the model must have."""
        found: dict[str, Any] = {} if self.task == "image-classification" else {"vocab": self.vocab}
        if self.source is not self.target:
            found["source_vocab"] = self.source.vocab
        if self.labels is not None and self.task != "language-model":
            found["classes"] = len(self.labels)
        return found

    @property
    def offered_keywords(self) -> dict[str, int]:
        """Model keywords that the data determines where a model has them: the size of images, the blocks of them."""
        if not isinstance(self.source, PixelTokenizer):
            return {}
        rows, columns = self.source.block
        blocks = {"rows": rows, "columns": columns} if self.task == "language-model" else {}
        return self.source.shape._asdict() | blocks

    def describe(self) -> list[str]:
        """For people: what it is, how much of it, and where it is from."""
        return list(self.lines)

    def check_length(self, max_length: int | None) -> None:
        """UserError where a sequence is longer than the `max_length` that the model allows (None: any length)."""
        for span in self.spans:
            if max_length is not None and span.length > max_length:
                raise UserError(
                    f"{span.subject} has {span.length} tokens, but the model allows {max_length}; {span.remedy}"
                )

    def examples(self, split: str) -> Iterator[HeldOutExample]:
        """The held-out pairs or labelled texts ("valid" or "test") as they were read, in the order they were read."""
        return read_examples(self.cache, split)

    def save(self, folder: str | Path) -> None:
        """Writes what using the model takes (tokenizers, labels); `load_tokenizers` reads it."""
        self.tokenizers.save(Path(folder))


def read_examples(cache: Path, split: str) -> Iterator[HeldOutExample]:
    """The held-out rows that preparing wrote down."""
    with (cache / f"{split}.jsonl").open(encoding="utf-8") as file:
        for line in file:
            yield HeldOutExample(*json.loads(line))


def human_amount(number: float, unit: str) -> str:
    """A quantity for people: "11.1 M characters"."""
    for size, sign in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if number >= size:
            # Ten thousand and more in thousands, so that 1,014 stays exact.
            scale = 1e3 if sign == " k" else size
            return f"{number / scale:.1f}{sign} {unit}"
    return f"{number:,} {unit}"
