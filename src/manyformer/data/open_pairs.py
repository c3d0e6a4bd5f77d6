"""Opening pairs of texts: read, divided, tokenized into shards once, then batches of pairs of similar length."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from manyformer.config import PairsData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.epochs import HeldOutBatches, TextUnits
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.opened import LengthLimit, OpenedData, read_examples
from manyformer.data.padded_examples import PairDataset
from manyformer.data.pair_tables import NORMALIZATION, table
from manyformer.data.ragged import IntArray
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import SplitRecorder, TableSplits
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardWriters, writing_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError

Say = Callable[[str], None]
# Pairs tokenized in one call.
_BLOCK = 2000
# Of the default corpus, besides what validation holds out.
_TEST_SHARE = 0.02


def open_pairs(data: PairsData, *, batch_tokens: int, cache: Path, seed: int, say: Say) -> OpenedData:
    """Pairs for an encoder-decoder; `batch_tokens` bounds the padded tokens of the longer side."""
    splits = _splits(data, cache)
    asked: dict[str, Any] = {"kind": "pairs", "tokenizer": data.tokenizer, "vocab": data.vocab, "shared": data.shared}
    asked |= {"shares": splits.shares, "stamps": splits.stamps(), "library": tokenizers.__version__}
    ready = load_or_prepare(cache, asked, lambda: _make(data, splits, cache, say))
    pairs = {name: PairDataset(ready.shards[f"{name}.source"], ready.shards[f"{name}.target"]) for name in splits.names}
    kept = np.flatnonzero(pairs["train"].lengths <= data.max_length)
    _refuse_little(pairs["train"].lengths[kept], batch_tokens, data.max_length)
    held = {name: _held(pairs[name], ready, name, batch_tokens) for name in splits.names if name != "train"}
    return OpenedData(
        task="translation",
        tokenizers=ready.tokenizers,
        train=Sampler(LengthBuckets(pairs["train"], kept, batch_tokens), seed),
        valid=held["valid"],
        test=held.get("test"),
        lines=tuple(_lines(data, splits, ready, pairs, kept)),
        spans=tuple(_spans(pairs, kept, cache)),
        cache=cache,
    )


def _splits(data: PairsData, cache: Path) -> TableSplits:
    columns, usual = (data.source, data.target), ("source", "target")
    splits = TableSplits.read(lambda path: [table(path, columns, usual, cache)], data.path, data.valid, data.test)
    if data.test is None and data.path == NORMALIZATION:
        splits.shares["test"] = min(_TEST_SHARE, (1 - sum(splits.shares.values())) / 2)
    return splits


def _make(data: PairsData, splits: TableSplits, cache: Path, say: Say) -> PreparationResult:
    say(f"preparing pairs: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    made = _learn(data, splits)
    names = [f"{name}.{side}" for name in splits.names for side in ("source", "target")]
    vocab = max(made.source.vocab, made.target.vocab)
    with ExitStack() as stack:
        writers = stack.enter_context(writing_shards(cache, names, vocab))
        record = SplitRecorder(splits, cache, stack)
        for name, rows in record.blocks(_BLOCK):
            _add(writers, name, rows, made)
        hashes = record.hashes()
    return PreparationResult(made, writers.facts, hashes, {"pairs": record.counts})


def _learn(data: PairsData, splits: TableSplits) -> TokenizerPair:
    def cells(side: int) -> Iterator[str]:
        return (row.cells[side] for row in splits.training())

    if data.shared:
        both = chain.from_iterable(row.cells for row in splits.training())
        tokenizer = Tokenizer.train(data.tokenizer, both, data.vocab)
        return TokenizerPair(tokenizer, tokenizer)
    source, target = (Tokenizer.train(data.tokenizer, cells(side), data.vocab) for side in (0, 1))
    return TokenizerPair(source, target)


def _add(writers: ShardWriters, name: str, rows: list[TableRow], made: TokenizerPair) -> None:
    source, target = ([row.cells[side] for row in rows] for side in (0, 1))
    for text, ids in zip(source, made.source.encode_many(source), strict=True):
        writers.shards[f"{name}.source"].add(np.append(ids, made.source.eos), begins=True, text=text)
    bos, eos = made.target.bos, made.target.eos
    for text, ids in zip(target, made.target.encode_many(target), strict=True):
        writers.shards[f"{name}.target"].add(np.concatenate([[bos], ids, [eos]]), begins=True, text=text)


def _refuse_little(lengths: IntArray, batch_tokens: int, max_length: int) -> None:
    if not len(lengths):
        raise UserError(
            f"no training pair is as short as data.longest allows ({max_length} tokens on a side); set it higher"
        )
    if int(lengths.max()) > batch_tokens:
        raise UserError(
            f"the longest training pair has {int(lengths.max())} tokens on a side, more than a batch of {batch_tokens} "
            "(batch.tokens); set batch.tokens higher or data.longest lower"
        )
    if int(lengths.sum()) < batch_tokens:
        raise UserError(
            f"the {len(lengths):,} training pairs have {int(lengths.sum()):,} tokens, fewer than one batch of "
            f"{batch_tokens:,} (batch.tokens); give more pairs or set batch.tokens lower"
        )


def _held(pairs: PairDataset, ready: PreparedData, name: str, batch_tokens: int) -> HeldOutBatches:
    facts = ready.shards[f"{name}.target"].facts
    units = TextUnits(facts.tokens - facts.documents, facts.characters, facts.bytes)
    return HeldOutBatches(LengthBuckets(pairs, np.arange(len(pairs.lengths)), batch_tokens).fixed(), units)


def _spans(pairs: dict[str, PairDataset], kept: IntArray, cache: Path) -> Iterator[LengthLimit]:
    max_length = int(pairs["train"].lengths[kept].max())
    yield LengthLimit(
        max_length, "the longest training pair", "leave such pairs out with data.longest, or build a longer model"
    )
    for name, one in pairs.items():
        if name != "train":
            place = int(one.lengths.argmax())
            example = next(islice(read_examples(cache, name), place, None))
            mend = "no held-out pair is left out: build a longer model or shorten the text"
            yield LengthLimit(int(one.lengths[place]), f"the longest {name} pair ({example.where})", mend)


def _lines(
    data: PairsData, splits: TableSplits, ready: PreparedData, pairs: dict[str, PairDataset], kept: IntArray
) -> Iterator[str]:
    counts = ready.counts["pairs"]
    yield f"pairs: {splits.tables['train'][0].name}"
    sizes = f"{ready.tokenizers.target.vocab:,}"
    if not data.shared:
        sizes = f"{ready.tokenizers.source.vocab:,} (source) and {sizes} (target)"
    yield f"tokens: {data.tokenizer}, vocabulary {sizes}{', shared by both sides' * data.shared}"
    left_out = len(pairs["train"].lengths) - len(kept)
    longer = f" ({left_out:,} longer than {data.max_length} tokens left out)" if left_out else ""
    yield f"train: {len(kept):,} pairs{longer}; " + "; ".join(
        f"{name}: {count:,} pairs" for name, count in counts.items() if name != "train"
    )
