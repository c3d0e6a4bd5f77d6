"""Opening pairs of texts: split, tokenized into shards once, then read as batches of pairs of similar length."""

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from manyformer.batches import TextUnits
from manyformer.config import PairsData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.opened import LengthLimit, OpenedData, read_examples
from manyformer.data.padded_examples import PairDataset
from manyformer.data.pair_tables import NORMALIZATION_CORPUS, open_table
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import SplitRecorder, TableSplits
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardWriters, write_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError
from manyformer.type_aliases import IntArray, LogFn

# Pairs tokenized in one call.
_BLOCK_ROWS = 2000
# The share of the default corpus that is held out for testing, besides validation.
_TEST_SHARE = 0.02


def open_pairs(data: PairsData, *, batch_tokens: int, cache: Path, seed: int, log: LogFn) -> OpenedData:
    """Open pairs for an encoder-decoder; `batch_tokens` bounds the padded tokens of the longer side."""
    splits = _pair_splits(data, cache)
    settings: dict[str, Any] = {
        "kind": "pairs",
        "tokenizer": data.tokenizer,
        "vocab": data.vocab,
        "shared": data.shared,
    }
    settings |= {"shares": splits.shares, "stamps": splits.stamps(), "library": tokenizers.__version__}
    prepared = load_or_prepare(cache, settings, lambda: _prepare(data, splits, cache, log))
    pairs = {
        name: PairDataset(prepared.shards[f"{name}.source"], prepared.shards[f"{name}.target"]) for name in splits.names
    }
    train_indices = np.flatnonzero(pairs["train"].lengths <= data.max_length)
    _check_batch_size(pairs["train"].lengths[train_indices], batch_tokens, data.max_length)
    held_out = {name: _held_out(pairs[name], prepared, name, batch_tokens) for name in splits.names if name != "train"}
    return OpenedData(
        task="translation",
        tokenizers=prepared.tokenizers,
        train=Sampler(LengthBuckets(pairs["train"], train_indices, batch_tokens), seed),
        valid=held_out["valid"],
        test=held_out.get("test"),
        summary_lines=tuple(_summary_lines(data, splits, prepared, pairs, train_indices)),
        length_limits=tuple(_length_limits(pairs, train_indices, cache)),
        cache=cache,
    )


def _pair_splits(data: PairsData, cache: Path) -> TableSplits:
    columns, default_names = (data.source, data.target), ("source", "target")
    splits = TableSplits.read(
        lambda path: [open_table(path, columns, default_names, cache)], data.path, data.valid, data.test
    )
    if data.test is None and data.path == NORMALIZATION_CORPUS:
        splits.shares["test"] = min(_TEST_SHARE, (1 - sum(splits.shares.values())) / 2)
    return splits


def _prepare(data: PairsData, splits: TableSplits, cache: Path, log: LogFn) -> PreparationResult:
    log(f"preparing pairs: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    tokenizer_pair = _train_tokenizers(data, splits)
    names = [f"{name}.{side}" for name in splits.names for side in ("source", "target")]
    vocab = max(tokenizer_pair.source.vocab, tokenizer_pair.target.vocab)
    with ExitStack() as stack:
        writers = stack.enter_context(write_shards(cache, names, vocab))
        record = SplitRecorder(splits, cache, stack)
        for name, rows in record.blocks(_BLOCK_ROWS):
            _add_rows(writers, name, rows, tokenizer_pair)
        hashes = record.hashes()
    return PreparationResult(tokenizer_pair, writers.facts, hashes, {"pairs": record.counts})


def _train_tokenizers(data: PairsData, splits: TableSplits) -> TokenizerPair:
    def cells(side: int) -> Iterator[str]:
        return (row.cells[side] for row in splits.training_rows())

    if data.shared:
        texts = chain.from_iterable(row.cells for row in splits.training_rows())
        tokenizer = Tokenizer.train(data.tokenizer, texts, data.vocab)
        return TokenizerPair(tokenizer, tokenizer)
    source, target = (Tokenizer.train(data.tokenizer, cells(side), data.vocab) for side in (0, 1))
    return TokenizerPair(source, target)


def _add_rows(writers: ShardWriters, name: str, rows: list[TableRow], tokenizer_pair: TokenizerPair) -> None:
    source, target = ([row.cells[side] for row in rows] for side in (0, 1))
    for text, ids in zip(source, tokenizer_pair.source.encode_many(source), strict=True):
        writers.shards[f"{name}.source"].add(np.append(ids, tokenizer_pair.source.eos), starts_document=True, text=text)
    bos, eos = tokenizer_pair.target.bos, tokenizer_pair.target.eos
    for text, ids in zip(target, tokenizer_pair.target.encode_many(target), strict=True):
        writers.shards[f"{name}.target"].add(np.concatenate([[bos], ids, [eos]]), starts_document=True, text=text)


def _check_batch_size(lengths: IntArray, batch_tokens: int, max_length: int) -> None:
    if not len(lengths):
        raise UserError(
            f"no training pair is as short as data.max_length allows ({max_length} tokens on a side); set it higher"
        )
    if int(lengths.max()) > batch_tokens:
        raise UserError(
            f"the longest training pair has {int(lengths.max())} tokens on a side, more than a batch of {batch_tokens} "
            "(batch.tokens); set batch.tokens higher or data.max_length lower"
        )
    if int(lengths.sum()) < batch_tokens:
        raise UserError(
            f"the {len(lengths):,} training pairs have {int(lengths.sum()):,} tokens, fewer than one batch of "
            f"{batch_tokens:,} (batch.tokens); give more pairs or set batch.tokens lower"
        )


def _held_out(pairs: PairDataset, prepared: PreparedData, name: str, batch_tokens: int) -> HeldOutBatches:
    facts = prepared.shards[f"{name}.target"].facts
    units = TextUnits(facts.tokens - facts.documents, facts.characters, facts.bytes)
    return HeldOutBatches(LengthBuckets(pairs, np.arange(len(pairs.lengths)), batch_tokens).fixed_epoch(), units)


def _length_limits(pairs: dict[str, PairDataset], train_indices: IntArray, cache: Path) -> Iterator[LengthLimit]:
    max_length = int(pairs["train"].lengths[train_indices].max())
    yield LengthLimit(
        max_length, "the longest training pair", "leave such pairs out with data.max_length, or build a longer model"
    )
    for name, dataset in pairs.items():
        if name != "train":
            index = int(dataset.lengths.argmax())
            example = next(islice(read_examples(cache, name), index, None))
            remedy = "no held-out pair is left out: build a longer model or shorten the text"
            yield LengthLimit(int(dataset.lengths[index]), f"the longest {name} pair ({example.location})", remedy)


def _summary_lines(
    data: PairsData, splits: TableSplits, prepared: PreparedData, pairs: dict[str, PairDataset], train_indices: IntArray
) -> Iterator[str]:
    counts = prepared.counts["pairs"]
    yield f"pairs: {splits.tables['train'][0].name}"
    sizes = f"{prepared.tokenizers.target.vocab:,}"
    if not data.shared:
        sizes = f"{prepared.tokenizers.source.vocab:,} (source) and {sizes} (target)"
    yield f"tokens: {data.tokenizer}, vocabulary {sizes}{', shared by both sides' * data.shared}"
    left_out = len(pairs["train"].lengths) - len(train_indices)
    left_out_text = f" ({left_out:,} longer than {data.max_length} tokens left out)" if left_out else ""
    yield f"train: {len(train_indices):,} pairs{left_out_text}; " + "; ".join(
        f"{name}: {count:,} pairs" for name, count in counts.items() if name != "train"
    )
