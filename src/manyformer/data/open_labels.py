"""Opening labelled texts: read, divided, tokenized into shards once, then batches of texts of similar length."""

from collections.abc import Callable, Iterator
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
from manyformer.data.pair_tables import RowTable, table
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, SplitRecorder, TableSplits
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardWriters, writing_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError, nearest

Say = Callable[[str], None]
# Texts tokenized in one call.
_BLOCK = 2000


def open_labels(data: LabelsData, *, batch_tokens: int, cache: Path, seed: int, say: Say) -> OpenedData:
    """Labelled texts for a classifier; `batch_tokens` bounds the padded tokens of a batch."""
    splits = _splits(data, cache)
    asked: dict[str, Any] = {
        "kind": "labels",
        "tokenizer": data.tokenizer,
        "vocab": data.vocab,
        "max_length": data.max_length,
    }
    asked |= {"shares": splits.shares, "stamps": splits.stamps(), "library": tokenizers.__version__}
    ready = load_or_prepare(cache, asked, lambda: _make(data, splits, cache, say))
    texts = {
        name: LabelledDataset(ready.shards[f"{name}.text"], ready.shards[f"{name}.label"]) for name in splits.names
    }
    _refuse_little(texts["train"], batch_tokens)
    plans = {name: LengthBuckets(one, np.arange(len(one.lengths)), batch_tokens) for name, one in texts.items()}
    held = {name: HeldOutBatches(plan.fixed(), None) for name, plan in plans.items()}
    max_length = max(int(one.lengths.max()) for one in texts.values())
    return OpenedData(
        task="classification",
        tokenizers=ready.tokenizers,
        train=Sampler(plans["train"], seed),
        valid=held["valid"],
        test=held.get("test"),
        lines=tuple(_lines(data, splits, ready)),
        spans=(
            LengthLimit(max_length, "the longest text", "cut such texts with data.longest, or build a longer model"),
        ),
        cache=cache,
    )


def _splits(data: LabelsData, cache: Path) -> TableSplits:
    def read(paths: PathOrPaths) -> list[RowTable]:
        each = [paths] if isinstance(paths, str) else paths
        return [table(path, (data.text, data.label), ("text", "label"), cache) for path in each]

    return TableSplits.read(read, data.path, data.valid, data.test)


def _make(data: LabelsData, splits: TableSplits, cache: Path, say: Say) -> PreparationResult:
    say(f"preparing labelled texts: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    names = sorted({row.cells[1] for row in splits.training()})
    tokenizer = Tokenizer.train(data.tokenizer, (row.cells[0] for row in splits.training()), data.vocab)
    made = TokenizerPair(tokenizer, tokenizer, tuple(names))
    classes = {name: number for number, name in enumerate(names)}
    shards = [f"{name}.{side}" for name in splits.names for side in ("text", "label")]
    cut = 0
    with ExitStack() as stack:
        writers = stack.enter_context(writing_shards(cache, shards, max(tokenizer.vocab, len(names))))
        record = SplitRecorder(splits, cache, stack)
        for name, rows in record.blocks(_BLOCK):
            cut += _add(writers, name, rows, tokenizer, classes, data.max_length)
        hashes = record.hashes()
    if len(names) < 2:
        raise UserError(f"all training texts have the label {names[0]!r}; a classifier needs at least two labels")
    return PreparationResult(made, writers.facts, hashes, {"texts": record.counts, "cut": cut})


def _add(
    writers: ShardWriters,
    name: str,
    rows: list[TableRow],
    tokenizer: Tokenizer,
    classes: dict[str, int],
    max_length: int,
) -> int:
    # Gives how many texts were cut.
    texts = [row.cells[0] for row in rows]
    ids = tokenizer.encode_many(texts)
    for text, tokens in zip(texts, ids, strict=True):
        kept = np.concatenate([[tokenizer.bos], tokens[: max(0, max_length - 2)], [tokenizer.eos]])
        writers.shards[f"{name}.text"].add(kept, begins=True, text=text)
    for row in rows:
        if row.cells[1] not in classes:
            raise UserError(
                f"{row.where}: the label {row.cells[1]!r} does not occur in the training data; "
                f"{nearest(row.cells[1], classes)}"
            )
        writers.shards[f"{name}.label"].add([classes[row.cells[1]]], begins=True)
    return sum(len(tokens) > max_length - 2 for tokens in ids)


def _refuse_little(train: LabelledDataset, batch_tokens: int) -> None:
    max_length, total = int(train.lengths.max()), int(train.lengths.sum())
    if max_length > batch_tokens:
        raise UserError(
            f"the longest text has {max_length} tokens, more than a batch of {batch_tokens} (batch.tokens); "
            "set batch.tokens higher or data.longest lower"
        )
    if total < batch_tokens:
        raise UserError(
            f"the {len(train.lengths):,} training texts have {total:,} tokens, fewer than one batch of "
            f"{batch_tokens:,} (batch.tokens); give more texts or set batch.tokens lower"
        )


def _lines(data: LabelsData, splits: TableSplits, ready: PreparedData) -> Iterator[str]:
    labels = ready.tokenizers.labels
    assert labels is not None
    yield f"texts: {', '.join(one.name for one in splits.tables['train'])}; {len(labels):,} labels"
    yield f"tokens: {data.tokenizer}, vocabulary {ready.tokenizers.target.vocab:,}"
    yield "; ".join(f"{name}: {count:,} texts" for name, count in ready.counts["texts"].items())
    if ready.counts["cut"]:
        yield f"{ready.counts['cut']:,} texts cut at {data.max_length} tokens"
