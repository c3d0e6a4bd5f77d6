"""The common part of kinds of data that are tables of rows, and of those whose rows an encoder reads as text.

Held-out rows are kept as strings. Rows to label are read as in training, and their labels are compared alone."""

import hashlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import tee
from pathlib import Path
from typing import TypeVar

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write
from manyformer.base.files.json_text import json_text
from manyformer.base.type_aliases import IntArray
from manyformer.config import EncodedTextData, PairsData, TabularTextData, TreesData
from manyformer.data.batching.length_buckets import LengthBuckets, SequenceDataset, training_buckets
from manyformer.data.pipeline.data_paths import is_hub_dataset
from manyformer.data.pipeline.file_pipeline import FilePipeline
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.data.pipeline.opened import (
    EvaluationData,
    EvaluationPath,
    HeldOutExample,
    LengthLimit,
    UnlabelledData,
    UnlabelledInput,
    path_name,
    read_examples,
)
from manyformer.data.pipeline.splits import PathOrPaths, Splits, path_list
from manyformer.data.pipeline.summary import EXAMPLES, DataSummary, ExampleFacts, Finding, LengthSummary, Tally, plural
from manyformer.data.storage.cache_folder import PreparationResult, PreparedData
from manyformer.data.storage.token_shards import ShardWriter, TokenShard, open_shard, write_shards
from manyformer.data.text.pair_tables import RowTable, open_table
from manyformer.data.text.table_files import ColumnKey, TableRow, is_csv, is_jsonl
from manyformer.data.text.text_files import content_suffix
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, describe_tokenizer, section_tokenizer

TableData = TypeVar("TableData", bound=PairsData | TabularTextData | TreesData)
"""The section of a table."""
TabularT = TypeVar("TabularT", bound=TabularTextData)
"""The section of a table of texts."""
TSV = frozenset({".tsv", ".tab"})
# Rows of a table that are tokenized in one call.
_BLOCK_ROWS = 2000


class TablePipeline(FilePipeline[TableData, RowTable, LengthBuckets]):
    """A kind of data whose rows become examples, in batches of similar length.

    `title` is the data in messages, `noun` one example, and `unit` what its length counts. Prepared files include the
    held-out rows as text. A row needs its first `required_cells`, None for all of them; the others may be empty. Rows
    longer than `data.max_length` are cut, or left out of training, as `long_rows` says.
    """

    title: str
    noun: str
    unit: str = "tokens"
    required_cells: int | None = None
    long_rows: str = "left out"

    @abstractmethod
    def train_tokenizers(self, splits: Splits[RowTable]) -> TokenizerPair:
        """The tokenizers, and the labels if there are any."""

    @abstractmethod
    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        """Add rows to the shards of the sides; returns the length of each before it was cut."""

    def labels_of(self, row: TableRow) -> Sequence[str]:
        """The labels of a row, which are counted: none where the data has no labels."""
        return ()

    def example_of(self, row: TableRow) -> Sequence[str]:
        """The cells of a row in a summary."""
        return row.cells

    def note_row(self, noun: str, fate: str, row: TableRow) -> None:
        """Count something in a row, such as an "answer", whose `fate` a line of the summary says."""
        self._encoding_tallies.setdefault((noun, fate), Tally()).add(row.location)

    def encoding_findings(self) -> Iterator[Finding]:
        """The findings about the rows that `add_rows` has encoded."""
        for (noun, fate), tally in self._encoding_tallies.items():
            yield Finding(tally.count, f"{plural(tally.count, noun)} {fate}", tally.first)

    @cached_property
    def _encoding_tallies(self) -> dict[tuple[str, str], Tally]:
        return {}

    @abstractmethod
    def dataset(self, shards: Sequence[TokenShard]) -> SequenceDataset:
        """The examples in the shards of the sides."""

    def max_vocab(self) -> int:
        """An upper bound of the numbers in all shards."""
        source, target, labels = self.tokenizers
        return max(source.vocab, target.vocab, len(labels or ()))

    def prepare(self, splits: Splits[RowTable], folder: Path) -> PreparationResult:
        self.request.log(f"preparing {self.title}: {splits.sources['train'][0].name} ({self.tokens_text()})")
        # this is a pass over the training rows of its own: nothing can be encoded before it ends
        self.tokenizers = self.train_tokenizers(splits)
        # a survey may have prepared the same rows before
        self._encoding_tallies.clear()
        facts = ExampleFacts(splits.names)
        empty = Tally()
        hashers = {name: hashlib.sha256() for name in splits.names}
        shard_names = [shard_name for name in splits.names for shard_name in self.shard_names(name)]
        with ExitStack() as stack:
            writers = stack.enter_context(write_shards(folder, shard_names, self.max_vocab()))
            files = {
                name: stack.enter_context(atomic_write(folder / f"{name}.jsonl"))
                for name in splits.names
                if name != "train"
            }
            for name, rows in _group_rows(split_rows(splits, required_cells=self.required_cells, left_out=empty)):
                lines = [json_text([*row.cells, row.location]) for row in rows]
                content = "".join(f"{line}\n" for line in lines).encode()
                # the hash is of what was read, the facts of shards are of what became of it
                hashers[name].update(content)
                if name in files:
                    files[name].write(content)
                split_writers = [writers.shards[shard_name] for shard_name in self.shard_names(name)]
                facts.lengths[name].extend(self.add_rows(split_writers, rows))
                if name == "train":
                    facts.labels.update(label for row in rows for label in self.labels_of(row))
                    # the first rows of a block are enough: only a few examples are kept at all
                    for row in rows[:EXAMPLES]:
                        facts.show(self.example_of(row))
            splits.check_counts(facts.counts, "rows")
        hashes = {name: hasher.hexdigest() for name, hasher in hashers.items()}
        counts = {f"{self.noun}s": facts.counts}
        return PreparationResult(self.tokenizers, writers.facts, hashes, counts, self._summary(splits, facts, empty))

    def _summary(self, splits: Splits[RowTable], facts: ExampleFacts, empty: Tally) -> DataSummary:
        """The summary of the rows that were read; `empty` counts those left out for an empty cell."""
        if self.long_rows == "cut":
            affected = [*facts.lengths]
        else:
            affected = ["train"]
        left_out = splits.found()
        if empty.count:
            left_out.append(
                Finding(empty.count, f"{plural(empty.count, 'row')} with an empty cell left out", empty.first)
            )
        left_out += self.encoding_findings()
        return DataSummary(
            noun=self.noun,
            counts=facts.counts,
            labels=dict(facts.labels) or None,
            lengths=self._lengths(facts.lengths_of(affected)),
            left_out=tuple(left_out),
            examples=facts.examples,
            is_part=splits.are_cut_short,
        )

    def summarize(
        self, splits: Splits[RowTable], prepared: PreparedData, plans: Mapping[str, LengthBuckets]
    ) -> DataSummary:
        # files of earlier versions have no summary, only counts
        summary = prepared.summary or DataSummary(self.noun, prepared.counts[f"{self.noun}s"])
        if self.long_rows == "cut":
            return summary
        # what is left out is decided when prepared files are opened
        return summary._replace(lengths=self._lengths(plans["train"].examples.lengths))

    def _lengths(self, lengths: IntArray) -> LengthSummary:
        return LengthSummary.of(
            lengths, self.unit, limit=self.data.max_length, setting="data.max_length", fate=self.long_rows
        )

    def write_file(self, path: EvaluationPath) -> list[TokenShard]:
        shards = self.write_rows(self.rows_of_file(path))
        self.log_findings(self.encoding_findings())
        return shards

    def rows_of_file(self, path: EvaluationPath) -> list[TableRow]:
        """The rows of files, with a line in the log for what is odd about them. Raises UserError if there are none."""
        # a list, since rows are encoded and, as strings, compared with what the model writes
        rows = list(self.read_file(path, lambda table: table.rows()))
        if not rows:
            raise UserError(f"{path}: there is nothing in it")
        empty = Tally()
        for row in rows:
            if not all(row.cells[: self.required_cells]):
                empty.add(row.location)
        if empty.count:
            description = f"{plural(empty.count, 'row')} with an empty cell, scored as it stands"
            self.log_findings([Finding(empty.count, description, empty.first)])
        return rows

    def write_rows(self, rows: Sequence[TableRow]) -> list[TokenShard]:
        """Write the shards of rows for a trained model."""
        folder = self.request.cache
        self._encoding_tallies.clear()
        with write_shards(folder, self.sides, self.max_vocab()) as writers:
            self.add_rows(list(writers.shards.values()), rows)
        return [open_shard(folder, side, facts) for side, facts in writers.facts.items()]

    def plan(self, shards: Sequence[TokenShard], split: str) -> LengthBuckets:
        dataset = self.dataset(shards)
        batch_tokens = self.request.batch_tokens
        if split != "train":
            return LengthBuckets(dataset, batch_tokens)
        max_length = self.data.max_length
        return training_buckets(dataset, batch_tokens, noun=self.noun, max_length=max_length, unit=self.unit)

    def describe(
        self, splits: Splits[RowTable], prepared: PreparedData, plans: Mapping[str, LengthBuckets]
    ) -> Iterator[str]:
        labels = self.tokenizers.labels
        label_text = ""
        if labels is not None:
            label_text = f"; {len(labels):,} {self.labels_title()}"
        yield f"{self.title}: {splits.source_names()}{label_text}"
        yield f"tokens: {self.tokens_text().removesuffix(' tokens')}, vocabulary {self.vocab_text()}"
        yield "; ".join(f"{name}: {len(plan.indices):,} {self.noun}s" for name, plan in plans.items())
        if splits.shares:
            yield "held out: " + ", ".join(f"a share of {share:g} ({name})" for name, share in splits.shares.items())
        yield from splits.notes()

    def tokens_text(self) -> str:
        """A description of the tokens for display."""
        return (
            describe_tokenizer(self.data) if isinstance(self.data, EncodedTextData) else f"{self.data.tokenizer} tokens"
        )

    def labels_title(self) -> str:
        """A description of the labels for display."""
        return "labels"

    def vocab_text(self) -> str:
        """The size of the vocabulary for display."""
        return f"{self.tokenizers.target.vocab:,}"


class TabularTextPipeline(TablePipeline[TabularT]):
    """Rows of texts for an encoder; `columns` are the settings that name the columns, the texts first."""

    prepared_settings = ("tokenizer", "vocab", "max_length")
    columns: tuple[str, ...]
    texts: int
    """The number of columns that are texts, from which a tokenizer is trained."""
    long_rows = "cut"

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RowTable]:
        keys: list[ColumnKey | None] = [getattr(self.data, column) for column in self.columns]
        cache = self.request.cache
        header = self.data.header
        return [open_table(path, keys, self.columns, cache, header=header) for path in path_list(paths)]

    def train_tokenizers(self, splits: Splits[RowTable]) -> TokenizerPair:
        rows = training_rows(splits, required_cells=self.required_cells)
        tokenizer = section_tokenizer(self.data, (cell for row in rows for cell in row.cells[: self.texts]))
        return TokenizerPair(tokenizer, tokenizer, self.label_names(splits))

    def labels_of(self, row: TableRow) -> Sequence[str]:
        if self.tokenizers.labels is not None:
            return row.cells[-1:]
        return ()

    def label_names(self, splits: Splits[RowTable]) -> tuple[str, ...] | None:
        """The names of the labels, which are in the last column. Raises UserError if there is one alone."""
        labels = sorted({row.cells[-1] for row in training_rows(splits)})
        if len(labels) == 1:
            raise UserError(
                f"all training {self.title} have the label {labels[0]!r}; a classifier needs at least two labels"
            )
        return tuple(labels)

    def held_out(self, split: str | None) -> EvaluationData:
        evaluation = super().held_out(split)
        return evaluation._replace(examples=tuple(read_examples(self.request.cache, evaluation.name)))

    def from_file(self, path: EvaluationPath) -> EvaluationData:
        # as strings alone, so that a label that does not occur in training is an error of the model
        return EvaluationData(path_name(path), None, examples_of_rows(self.rows_of_file(path)))

    def length_limits(self, plans: Mapping[str, LengthBuckets]) -> Iterator[LengthLimit]:
        remedy = "cut such texts with data.max_length, or build a longer model"
        yield LengthLimit(max(plan.max_length for plan in plans.values()), "the longest text", remedy)


def split_rows(
    splits: Splits[RowTable], *, required_cells: int | None = None, left_out: Tally | None = None
) -> Iterator[tuple[str, TableRow]]:
    """Stream each row with its split; rows with an empty cell are left out, except in splits read from a path.

    Training rows whose first cells differ only in case are in one split. Only the first `required_cells` are looked
    at, None for all. `left_out` counts the rows that are left out.
    """
    for table in splits.sources["train"]:
        for row in table.rows():
            if all(row.cells[:required_cells]):
                yield splits.assign(row.cells[0].casefold().encode()) if splits.shares else "train", row
            elif left_out is not None:
                left_out.add(row.location)
    for name, tables in splits.sources.items():
        if name != "train":
            yield from ((name, row) for table in tables for row in table.rows())


def training_rows(splits: Splits[RowTable], *, required_cells: int | None = None) -> Iterator[TableRow]:
    """Stream the rows of the training split, from which tokenizers are trained."""
    # with the shares: rows that are held out must not reach the tokenizer
    training = Splits({"train": splits.sources["train"]}, splits.shares)
    return (row for name, row in split_rows(training, required_cells=required_cells) if name == "train")


def examples_of_rows(rows: Iterable[TableRow]) -> tuple[HeldOutExample, ...]:
    """Pairs, or texts and labels, as strings."""
    return tuple(HeldOutExample.of_cells(row.cells, row.location) for row in rows)


def _group_rows(rows: Iterable[tuple[str, TableRow]]) -> Iterator[tuple[str, list[TableRow]]]:
    """Blocks of rows of one split."""
    # tokenizers of the library are many times faster on many texts in one call
    blocks: dict[str, list[TableRow]] = {}
    for name, row in rows:
        blocks.setdefault(name, []).append(row)
        if len(blocks[name]) == _BLOCK_ROWS:
            yield name, blocks.pop(name)
    yield from blocks.items()


def is_table(path: str) -> bool:
    """Whether the name is that of a table, not of lines of text."""
    return is_hub_dataset(path) or is_jsonl(Path(path)) or is_csv(Path(path)) or content_suffix(Path(path)) in TSV


def open_unlabelled(
    path: str, keys: Sequence[ColumnKey | None], names: Sequence[str], data: TabularTextData, request: OpenRequest
) -> RowTable:
    """The table of inputs at `path`, whose last column, the label, may be missing."""
    table = open_table(path, keys, names, request.cache, header=data.header, optional=1)
    for note in table.notes:
        request.log(note)
    return table


def unlabelled_rows(
    table: RowTable,
    request: OpenRequest,
    *,
    name: Callable[[TableRow], str],
    texts: int = 1,
    labels: Collection[str] | None = None,
) -> UnlabelledData:
    """The rows of a table as inputs; the last cell is the label, empty where there is none.

    What else is in the table is logged at its end, and a label that is not one of `labels` once."""

    def rows() -> Iterator[TableRow]:
        unknown = False
        for row in table.rows():
            if labels is not None and row.cells[-1] and row.cells[-1] not in labels and not unknown:
                unknown = True
                request.log(
                    f"{row.location}: {row.cells[-1][:60]!r}, in the place of a label, is no label of this model; the "
                    "text is the cell in its own column alone"
                )
            yield row
        for finding in table.found():
            request.log(str(finding))

    # two iterators over one pass: a pipe cannot be read twice
    read, named = tee(rows())
    inputs = (UnlabelledInput(name(row), expected=row.cells[-1] or None) for row in named)
    if texts == 1:
        return UnlabelledData(inputs, texts=(row.cells[0] for row in read))
    return UnlabelledData(inputs, pairs=((row.cells[0], row.cells[1]) for row in read))
