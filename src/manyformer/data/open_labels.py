"""Opening labelled texts: split, tokenized into shards once, then read as batches of texts of similar length."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from manyformer.config import LabelsData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.opened import LengthLimit, OpenedData
from manyformer.data.padded_examples import LabelledDataset
from manyformer.data.pair_tables import RowTable, open_table
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, SplitRecorder, TableSplits
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardWriters, write_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError, suggest_names
from manyformer.type_aliases import LogFn

# Texts tokenized in one call.
_BLOCK_ROWS = 2000


def open_labels(data: LabelsData, *, batch_tokens: int, cache: Path, seed: int, log: LogFn) -> OpenedData:
    """Open labelled texts for a classifier; `batch_tokens` bounds the padded tokens of a batch."""
    splits = _label_splits(data, cache)
    settings: dict[str, Any] = {
        "kind": "labels",
        "tokenizer": data.tokenizer,
        "vocab": data.vocab,
        "max_length": data.max_length,
    }
    settings |= {"shares": splits.shares, "stamps": splits.stamps(), "library": tokenizers.__version__}
    prepared = load_or_prepare(cache, settings, lambda: _prepare(data, splits, cache, log))
    datasets = {
        name: LabelledDataset(prepared.shards[f"{name}.text"], prepared.shards[f"{name}.label"])
        for name in splits.names
    }
    _check_batch_size(datasets["train"], batch_tokens)
    plans = {
        name: LengthBuckets(dataset, np.arange(len(dataset.lengths)), batch_tokens)
        for name, dataset in datasets.items()
    }
    held_out = {name: HeldOutBatches(plan.fixed_epoch(), None) for name, plan in plans.items()}
    max_length = max(int(dataset.lengths.max()) for dataset in datasets.values())
    return OpenedData(
        task="classification",
        tokenizers=prepared.tokenizers,
        train=Sampler(plans["train"], seed),
        valid=held_out["valid"],
        test=held_out.get("test"),
        summary_lines=tuple(_summary_lines(data, splits, prepared)),
        length_limits=(
            LengthLimit(max_length, "the longest text", "cut such texts with data.max_length, or build a longer model"),
        ),
        cache=cache,
    )


def _label_splits(data: LabelsData, cache: Path) -> TableSplits:
    def read(paths: PathOrPaths) -> list[RowTable]:
        path_list = [paths] if isinstance(paths, str) else paths
        return [open_table(path, (data.text, data.label), ("text", "label"), cache) for path in path_list]

    return TableSplits.read(read, data.path, data.valid, data.test)


def _prepare(data: LabelsData, splits: TableSplits, cache: Path, log: LogFn) -> PreparationResult:
    log(f"preparing labelled texts: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    label_names = sorted({row.cells[1] for row in splits.training_rows()})
    tokenizer = Tokenizer.train(data.tokenizer, (row.cells[0] for row in splits.training_rows()), data.vocab)
    tokenizer_pair = TokenizerPair(tokenizer, tokenizer, tuple(label_names))
    classes = {name: number for number, name in enumerate(label_names)}
    shards = [f"{name}.{side}" for name in splits.names for side in ("text", "label")]
    truncated = 0
    with ExitStack() as stack:
        writers = stack.enter_context(write_shards(cache, shards, max(tokenizer.vocab, len(label_names))))
        record = SplitRecorder(splits, cache, stack)
        for name, rows in record.blocks(_BLOCK_ROWS):
            truncated += _add_rows(writers, name, rows, tokenizer, classes, data.max_length)
        hashes = record.hashes()
    if len(label_names) < 2:
        raise UserError(f"all training texts have the label {label_names[0]!r}; a classifier needs at least two labels")
    return PreparationResult(tokenizer_pair, writers.facts, hashes, {"texts": record.counts, "cut": truncated})


def _add_rows(
    writers: ShardWriters,
    name: str,
    rows: list[TableRow],
    tokenizer: Tokenizer,
    classes: dict[str, int],
    max_length: int,
) -> int:
    # Returns the number of truncated texts.
    texts = [row.cells[0] for row in rows]
    ids = tokenizer.encode_many(texts)
    for text, tokens in zip(texts, ids, strict=True):
        padded_ids = np.concatenate([[tokenizer.bos], tokens[: max(0, max_length - 2)], [tokenizer.eos]])
        writers.shards[f"{name}.text"].add(padded_ids, starts_document=True, text=text)
    for row in rows:
        if row.cells[1] not in classes:
            raise UserError(
                f"{row.location}: the label {row.cells[1]!r} does not occur in the training data; "
                f"{suggest_names(row.cells[1], classes)}"
            )
        writers.shards[f"{name}.label"].add([classes[row.cells[1]]], starts_document=True)
    return sum(len(tokens) > max_length - 2 for tokens in ids)


def _check_batch_size(train: LabelledDataset, batch_tokens: int) -> None:
    max_length, total = int(train.lengths.max()), int(train.lengths.sum())
    if max_length > batch_tokens:
        raise UserError(
            f"the longest text has {max_length} tokens, more than a batch of {batch_tokens} (batch.tokens); "
            "set batch.tokens higher or data.max_length lower"
        )
    if total < batch_tokens:
        raise UserError(
            f"the {len(train.lengths):,} training texts have {total:,} tokens, fewer than one batch of "
            f"{batch_tokens:,} (batch.tokens); give more texts or set batch.tokens lower"
        )


def _summary_lines(data: LabelsData, splits: TableSplits, prepared: PreparedData) -> Iterator[str]:
    labels = prepared.tokenizers.labels
    assert labels is not None
    yield f"texts: {', '.join(table.name for table in splits.tables['train'])}; {len(labels):,} labels"
    yield f"tokens: {data.tokenizer}, vocabulary {prepared.tokenizers.target.vocab:,}"
    yield "; ".join(f"{name}: {count:,} texts" for name, count in prepared.counts["texts"].items())
    if prepared.counts["cut"]:
        yield f"{prepared.counts['cut']:,} texts cut at {data.max_length} tokens"
