"""The opened data set that training, evaluation and generation use."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, final

from annotated_types import Len

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import parse_json, validate_json
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.data.batching.epochs import HeldOutBatches, TrainingFeed
from manyformer.data.pipeline.summary import DataSummary, wrapped
from manyformer.data.storage.token_shards import TokenShard
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.batches import Batch


class LengthLimit(NamedTuple):
    """The longest sequence of a split, and the message parts for models that do not allow it."""

    length: int
    subject: str
    remedy: str


def row_limit(length: int) -> LengthLimit:
    """The limit of data in rows of `length` tokens."""
    return LengthLimit(length, "a row (data.length)", "set data.length to that or less")


EvaluationPath = str | Sequence[str]
"""A file to score, or two parallel ones."""


class HeldOutExample(NamedTuple):
    """A held-out row as it was read, such as a pair or a text and its label, and its location; `more` is between."""

    source: str
    target: str
    location: str
    more: tuple[str, ...] = ()

    @classmethod
    def of_cells(cls, cells: Sequence[str], location: str) -> "HeldOutExample":
        """The example in the cells of a row, of which the last is the target."""
        source, *more, target = cells
        return cls(source, target, location, tuple(more))


class EvaluationData(NamedTuple):
    """The data to score: its name, its batches (None for a file of labelled texts), and pairs or labelled texts.

    `text` are the tokens by document, or the sources of pairs, in the order of `examples`; None for other data.
    """

    name: str
    batches: HeldOutBatches | None
    examples: tuple[HeldOutExample, ...] = ()
    text: TokenShard | None = None


class UnlabelledInput(NamedTuple):
    """An input to predict labels for: what it is called in results, its words if each of them gets a label, whether it
    is a file or a part of one, and the label that stands beside it, None if there is none.

    `annotate` returns the lines of the input's file with the labels of its words filled in.
    """

    name: str
    words: tuple[str, ...] = ()
    is_file: bool = False
    annotate: Callable[[Sequence[str]], list[str]] | None = None
    expected: str | None = None


class UnlabelledData(NamedTuple):
    """Inputs to predict labels for, as batches in the order of the inputs, as texts, or as pairs of texts."""

    inputs: Iterable[UnlabelledInput]
    batches: Iterable[Batch] | None = None
    texts: Iterable[str] = ()
    pairs: Iterable[tuple[str, str]] = ()


class DataSurvey(NamedTuple):
    """The result of a look at the data of a run without preparing it: lines with their subjects, and the facts."""

    lines: tuple[tuple[str, str], ...] = ()
    summary: DataSummary | None = None
    opened: "OpenedData | None" = None
    """The data, where it is small enough to be read as a whole."""
    length_limits: tuple[LengthLimit, ...] = ()
    """The longest sequences of the beginning of larger data."""

    @classmethod
    def of_all(cls, opened: "OpenedData") -> "DataSurvey":
        """The survey of data that was read as a whole."""
        return cls(tuple(opened.glance()), opened.summary, opened, opened.length_limits)


@final
@dataclass(frozen=True)
class OpenedData:
    """An opened data set: training and held-out batches, tokenizers, and the model keywords that follow from it.

    Every model needs the `required_keywords`; `offered_keywords` are for models that accept them.
    """

    tokenizers: TokenizerPair
    train: TrainingFeed
    valid: HeldOutBatches
    test: HeldOutBatches | None
    summary_lines: tuple[str, ...]
    length_limits: tuple[LengthLimit, ...]
    cache: Path
    required_keywords: Mapping[str, Any]
    offered_keywords: Mapping[str, int | None] = field(default_factory=dict)
    summary: DataSummary | None = None
    """The summary that a person can check, for kinds of data that have one."""

    @property
    def source(self) -> Tokenizer:
        """The tokenizer of the input."""
        return self.tokenizers.source

    @property
    def target(self) -> Tokenizer:
        """The tokenizer of the output: the same object as `source` if the vocabulary is shared."""
        return self.tokenizers.target

    @property
    def labels(self) -> tuple[str, ...] | None:
        """The label names of a classification, indexed by class id, else None."""
        return self.tokenizers.labels

    @property
    def vocab(self) -> int:
        """The size of the output vocabulary."""
        return self.target.vocab

    def describe(self) -> list[str]:
        """A summary of the data for display: its kind, its size, its origin, and what a person can check."""
        return [*self.summary_lines, *(() if self.summary is None else self.summary.facts())]

    def glance(self) -> list[tuple[str, str]]:
        """The description with a few examples and warnings, each line with its subject, for the start of a training."""
        return [*data_lines(self.describe()), *glance_lines(self.summary)]

    def check_length(self, max_length: int | None) -> None:
        """Raise UserError if a sequence is longer than the model's `max_length` (None: no limit)."""
        check_lengths(self.length_limits, max_length)

    def examples(self, split: str) -> Iterator[HeldOutExample]:
        """Stream the held-out pairs or labelled texts of a split ("valid" or "test") in the order of the source."""
        return read_examples(self.cache, split)

    def save(self, folder: str | Path) -> None:
        """Write the tokenizers and labels, which are needed to use a model; `load_tokenizers` reads them."""
        self.tokenizers.save(Path(folder))


def check_lengths(limits: Iterable[LengthLimit], max_length: int | None) -> None:
    """Raise UserError if one of the longest sequences is longer than a model's `max_length` (None: no limit)."""
    for limit in limits:
        if max_length is not None and limit.length > max_length:
            raise UserError(
                f"{limit.subject} has {limit.length} tokens, but the model allows {max_length}; {limit.remedy}"
            )


def glance_lines(summary: DataSummary | None) -> list[tuple[str, str]]:
    """The examples and the warnings of a summary, each line with its subject."""
    if summary is None:
        return []
    return [
        *(("data", line) for line in summary.example_lines()),
        *(("warning", line) for text in summary.warnings() for line in wrapped(text)),
    ]


def data_lines(texts: Iterable[str]) -> list[tuple[str, str]]:
    """Lines about data in 80 columns, each with its subject."""
    return [("data", line) for text in texts for line in wrapped(text)]


def read_examples(cache: Path, split: str) -> Iterator[HeldOutExample]:
    """Stream the held-out rows of a split that preparation saved in the cache. Raises DamagedFile."""
    path = VerifiedFolder.open(cache).file(f"{split}.jsonl")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            location = f"{path}:{number}"
            content = parse_json(line, location, "a row of held-out data")
            *cells, row_location = validate_json(content, Annotated[tuple[str, ...], Len(3)], location)
            # the location is that in the source, not in this file
            yield HeldOutExample.of_cells(cells, row_location)


def check_holds_row(length: int, batch_tokens: int) -> None:
    """Raise UserError if a batch is smaller than one row."""
    if batch_tokens < length:
        raise UserError(
            f"batch.tokens is {batch_tokens}, less than one row of {length} (data.length); set it to {length} or more"
        )


def path_name(path: EvaluationPath) -> str:
    """The name of a file, or of two files, to score."""
    if isinstance(path, str):
        return path
    return " and ".join(path)


def format_amount(number: float, unit: str) -> str:
    """Format a quantity with a unit prefix: "11.1 M characters"."""
    for unit_size, prefix in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if number >= unit_size:
            # thousands only from ten thousand on, so that 1,014 remains exact
            scale = 1e3 if prefix == " k" else unit_size
            return f"{number / scale:.1f}{prefix} {unit}"
    return f"{number:,} {unit}"
