"""Opening labelled texts: split, tokenized into shards once, then read as batches of texts of similar length."""

from collections.abc import Iterator
from itertools import tee
from pathlib import Path

import numpy as np

from manyformer.config import LabelsData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.example_splits import (
    examples_of_file,
    select_training_examples,
    split_batches,
    tokenized_settings,
    write_tables,
)
from manyformer.data.hub import is_hub_dataset
from manyformer.data.kind import DataKind, OpenRequest, prepared_split, register
from manyformer.data.opened import (
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    OpenedData,
    UnlabelledData,
    UnlabelledInput,
    path_name,
    read_examples,
)
from manyformer.data.padded_examples import LabelledDataset
from manyformer.data.pair_tables import open_table
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import TableSplits, tables_by_path
from manyformer.data.table_files import TableRow, is_jsonl
from manyformer.data.text_files import STDIN, existing_path, read_lines, save_stdin
from manyformer.data.token_shards import ShardWriters
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError, suggest_names

SIDES = ("text", "label")
"""The shards of each split, and the default columns of named tables."""


def open_labels(data: LabelsData, form: str, request: OpenRequest) -> OpenedData:
    """Open labelled texts for a classifier; `request.batch_tokens` bounds the padded tokens of a batch."""
    read = tables_by_path(lambda path: open_table(path, (data.text, data.label), SIDES, request.cache))
    splits = TableSplits.read(read, data.path, data.valid, data.test)
    settings = tokenized_settings(data, splits, max_length=data.max_length)
    prepared = load_or_prepare(request.cache, settings, lambda: _prepare(data, splits, request))
    tokenizers = prepared.tokenizers
    assert tokenizers.labels is not None
    datasets = {name: LabelledDataset(*(prepared.shards[f"{name}.{side}"] for side in SIDES)) for name in splits.names}
    train_indices = select_training_examples(
        datasets["train"].lengths, request.batch_tokens, noun="text", max_length=data.max_length
    )
    max_length = max(int(dataset.lengths.max()) for dataset in datasets.values())
    return OpenedData(
        tokenizers=tokenizers,
        **split_batches(datasets, train_indices, request.batch_tokens, request.seed)._asdict(),
        summary_lines=tuple(_summary_lines(data, splits, prepared)),
        length_limits=(
            LengthLimit(max_length, "the longest text", "cut such texts with data.max_length, or build a longer model"),
        ),
        cache=request.cache,
        required_keywords={"vocab": tokenizers.target.vocab, "classes": len(tokenizers.labels)},
    )


def held_out_labels(data: LabelsData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """A held-out split as texts with labels."""
    name, _ = prepared_split(open_labels, data, form, request, split)
    return EvaluationData(name, None, tuple(read_examples(request.cache, name)))


def labels_of_file(
    data: LabelsData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """The labelled texts of a table."""
    rows = open_table(path, (data.text, data.label), SIDES, request.cache).rows()
    return EvaluationData(path_name(path), None, examples_of_file(rows, path))


def unlabelled_texts(data: LabelsData, tokenizers: TokenizerPair, path: str, request: OpenRequest) -> UnlabelledData:
    """The lines of a text file or of standard input ("-"), or the texts of JSONL or a Hugging Face data set."""
    texts, names = tee(_read_texts(data, path, request))
    return UnlabelledData((UnlabelledInput(name) for name in names), texts=texts)


def _read_texts(data: LabelsData, path: str, request: OpenRequest) -> Iterator[str]:
    if is_hub_dataset(path) or is_jsonl(Path(path)):
        column = data.text if isinstance(data.text, str) else SIDES[0]
        return (row.cells[0] for row in open_table(path, (column,), (SIDES[0],), request.cache).rows())
    file = save_stdin(request.cache / "stdin.txt") if path == STDIN else existing_path(path)
    return (line.text for line in read_lines(file))


def _prepare(data: LabelsData, splits: TableSplits, request: OpenRequest) -> PreparationResult:
    request.log(f"preparing labelled texts: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    label_names = sorted({row.cells[1] for row in splits.training_rows()})
    tokenizer = Tokenizer.train(data.tokenizer, (row.cells[0] for row in splits.training_rows()), data.vocab)
    classes = {name: number for number, name in enumerate(label_names)}
    truncated = 0

    def add_rows(writers: ShardWriters, prefix: str, rows: list[TableRow]) -> None:
        nonlocal truncated
        truncated += _add_texts(writers, prefix, rows, tokenizer, data.max_length)
        _add_labels(writers, prefix, rows, classes)

    written = write_tables(splits, request.cache, SIDES, max(tokenizer.vocab, len(label_names)), add_rows)
    if len(label_names) < 2:
        raise UserError(f"all training texts have the label {label_names[0]!r}; a classifier needs at least two labels")
    counts = {"texts": written.counts, "cut": truncated}
    return PreparationResult(
        TokenizerPair(tokenizer, tokenizer, tuple(label_names)), written.facts, written.hashes, counts
    )


def _add_texts(writers: ShardWriters, prefix: str, rows: list[TableRow], tokenizer: Tokenizer, max_length: int) -> int:
    """Add the truncated texts; returns the number of texts that were longer than `max_length`."""
    texts = [row.cells[0] for row in rows]
    ids = tokenizer.encode_many(texts)
    for text, tokens in zip(texts, ids, strict=True):
        framed_ids = np.concatenate([[tokenizer.bos], tokens[: max(0, max_length - 2)], [tokenizer.eos]])
        writers.shards[f"{prefix}text"].add(framed_ids, starts_document=True, text=text)
    return sum(len(tokens) > max_length - 2 for tokens in ids)


def _add_labels(writers: ShardWriters, prefix: str, rows: list[TableRow], classes: dict[str, int]) -> None:
    for row in rows:
        if row.cells[1] not in classes:
            raise UserError(
                f"{row.location}: the label {row.cells[1]!r} does not occur in the training data; "
                f"{suggest_names(row.cells[1], classes)}"
            )
        writers.shards[f"{prefix}label"].add([classes[row.cells[1]]], starts_document=True)


def _summary_lines(data: LabelsData, splits: TableSplits, prepared: PreparedData) -> Iterator[str]:
    labels = prepared.tokenizers.labels
    assert labels is not None
    yield f"texts: {', '.join(table.name for table in splits.tables['train'])}; {len(labels):,} labels"
    yield f"tokens: {data.tokenizer}, vocabulary {prepared.tokenizers.target.vocab:,}"
    yield "; ".join(f"{name}: {count:,} texts" for name, count in prepared.counts["texts"].items())
    if prepared.counts["cut"]:
        yield f"{prepared.counts['cut']:,} texts cut at {data.max_length} tokens"


LABELS = register(
    DataKind(
        section=LabelsData,
        forms=("labelled",),
        open=open_labels,
        held_out=held_out_labels,
        from_file=labels_of_file,
        unlabelled=unlabelled_texts,
    )
)
