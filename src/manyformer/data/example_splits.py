"""Steps shared by kinds of data whose batches are examples of similar length: selection, batches, shards of tables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from manyformer.batches import TextUnits
from manyformer.config import TokenizedData
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.length_buckets import LengthBuckets, SequenceDataset
from manyformer.data.opened import EvaluationPath, HeldOutExample
from manyformer.data.sampler import Sampler
from manyformer.data.splits import SplitRecorder, TableSplits
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardFacts, ShardWriters, TokenShard, open_shard, write_shards
from manyformer.errors import UserError
from manyformer.type_aliases import IntArray

# Rows of a table that are tokenized in one call.
_BLOCK_ROWS = 2000


class WrittenTables(NamedTuple):
    """The shards of tables: facts of each shard, a hash of each split, and the number of rows of each split."""

    facts: dict[str, ShardFacts]
    hashes: dict[str, str]
    counts: dict[str, int]


def tokenized_settings(section: TokenizedData, splits: TableSplits, **settings: Any) -> dict[str, Any]:
    """The settings that decide the prepared files of a table: its section, `settings`, and its sources."""
    settings |= {"kind": section.kind, "tokenizer": section.tokenizer, "vocab": section.vocab}
    return settings | {"shares": splits.shares, "stamps": splits.stamps(), "library": tokenizers.__version__}


AddRowsFn = Callable[[ShardWriters, str, list[TableRow]], None]
"""Adds rows of a table to the shards whose names begin with a prefix."""


def write_tables(
    splits: TableSplits, cache: Path, sides: Sequence[str], vocab: int, add_rows: AddRowsFn
) -> WrittenTables:
    """Write the shards `sides` of every split, and the held-out rows as text."""
    names = [f"{name}.{side}" for name in splits.names for side in sides]
    with ExitStack() as stack:
        writers = stack.enter_context(write_shards(cache, names, vocab))
        record = SplitRecorder(splits, cache, stack)
        for name, rows in record.blocks(_BLOCK_ROWS):
            add_rows(writers, f"{name}.", rows)
        hashes = record.hashes()
    return WrittenTables(writers.facts, hashes, record.counts)


def write_rows(
    rows: Iterable[TableRow], folder: Path, sides: Sequence[str], vocab: int, add_rows: AddRowsFn
) -> dict[str, TokenShard]:
    """Write the shards `sides` of the rows of a file, for a trained model."""
    with write_shards(folder, sides, vocab) as writers:
        add_rows(writers, "", list(rows))
    return {side: open_shard(folder, side, facts) for side, facts in writers.facts.items()}


def examples_of_file(rows: Iterable[TableRow], path: EvaluationPath) -> tuple[HeldOutExample, ...]:
    """The rows of a file as examples. Raises UserError if there are none."""
    examples = tuple(HeldOutExample(row.cells[0], row.cells[1], row.location) for row in rows)
    if not examples:
        raise UserError(f"{path}: there is nothing in it")
    return examples


def select_training_examples(
    lengths: IntArray, batch_tokens: int, *, noun: str, max_length: int, unit: str = "tokens"
) -> IntArray:
    """The indices of training examples of at most `max_length` tokens. Raises UserError if they fill no batch."""
    indices = np.flatnonzero(lengths <= max_length)
    if not len(indices):
        raise UserError(
            f"no training {noun} is as short as data.max_length allows ({max_length} {unit}); set it higher"
        )
    lengths = lengths[indices]
    if int(lengths.max()) > batch_tokens:
        raise UserError(
            f"the longest training {noun} has {int(lengths.max())} {unit}, more than a batch of {batch_tokens} "
            "(batch.tokens); set batch.tokens higher or data.max_length lower"
        )
    check_fills_batch(int(lengths.sum()), batch_tokens, f"the {len(lengths):,} training {noun}s have", f"{noun}s")
    return indices


def check_fills_batch(
    total: int, batch_tokens: int, subject_and_verb: str, source: str, *, unit: str = "tokens"
) -> None:
    """Raise UserError if the training data does not fill one batch."""
    if total < batch_tokens:
        raise UserError(
            f"{subject_and_verb} {total:,} {unit}, fewer than one batch of {batch_tokens:,} (batch.tokens); "
            f"give more {source} or set batch.tokens lower"
        )


class SplitBatches(NamedTuple):
    """The batches of each split: training, validation, and test if there is such a split."""

    train: Sampler
    valid: HeldOutBatches
    test: HeldOutBatches | None


def split_batches(
    datasets: Mapping[str, SequenceDataset],
    train_indices: IntArray,
    batch_tokens: int,
    seed: int,
    units: Callable[[str], TextUnits | None] = lambda name: None,
) -> SplitBatches:
    """Batches of examples of similar length; held-out splits are complete and always in the same order."""
    held_out = {
        name: held_out_batches(dataset, batch_tokens, units(name))
        for name, dataset in datasets.items()
        if name != "train"
    }
    train = Sampler(LengthBuckets(datasets["train"], train_indices, batch_tokens), seed)
    return SplitBatches(train, held_out["valid"], held_out.get("test"))


def held_out_batches(dataset: SequenceDataset, batch_tokens: int, units: TextUnits | None = None) -> HeldOutBatches:
    """All examples in a fixed order."""
    return HeldOutBatches(LengthBuckets(dataset, np.arange(len(dataset.lengths)), batch_tokens).fixed_epoch(), units)


def shard_units(shard: TokenShard) -> TextUnits:
    """The units that scores are relative to; every token except the first of each document is a target."""
    return TextUnits(shard.facts.tokens - shard.facts.documents, shard.facts.characters, shard.facts.bytes)
