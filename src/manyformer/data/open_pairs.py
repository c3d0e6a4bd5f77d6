"""Opening pairs of texts: split, tokenized into shards once, then read as batches of pairs of similar length."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from manyformer.config import PairsData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.example_splits import (
    examples_of_file,
    held_out_batches,
    select_training_examples,
    shard_units,
    split_batches,
    tokenized_settings,
    write_rows,
    write_tables,
)
from manyformer.data.kind import DataKind, OpenRequest, prepared_split, register
from manyformer.data.opened import EvaluationData, EvaluationPath, LengthLimit, OpenedData, path_name, read_examples
from manyformer.data.padded_examples import PairDataset
from manyformer.data.pair_tables import NORMALIZATION_CORPUS, open_table
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import TableSplits
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardWriters, TokenShard
from manyformer.data.tokenizer import Tokenizer
from manyformer.type_aliases import IntArray

SIDES = ("source", "target")
"""The shards of each split, and the default columns of named tables."""
# The share of the default corpus that is held out for testing, besides validation.
_TEST_SHARE = 0.02


def open_pairs(data: PairsData, form: str, request: OpenRequest) -> OpenedData:
    """Open pairs for an encoder-decoder; `request.batch_tokens` bounds the padded tokens of the longer side."""
    splits = _pair_splits(data, request.cache)
    settings = tokenized_settings(data, splits, shared=data.shared)
    prepared = load_or_prepare(request.cache, settings, lambda: _prepare(data, splits, request))
    shards, tokenizers = prepared.shards, prepared.tokenizers
    pairs = {name: _pair_dataset(shards, f"{name}.") for name in splits.names}
    train_indices = select_training_examples(
        pairs["train"].lengths, request.batch_tokens, noun="pair", max_length=data.max_length, unit="tokens on a side"
    )
    batches = split_batches(
        pairs, train_indices, request.batch_tokens, request.seed, lambda name: shard_units(shards[f"{name}.target"])
    )
    keywords = {"vocab": tokenizers.target.vocab}
    if tokenizers.source is not tokenizers.target:
        keywords["source_vocab"] = tokenizers.source.vocab
    return OpenedData(
        tokenizers=tokenizers,
        **batches._asdict(),
        summary_lines=tuple(_summary_lines(data, splits, prepared, pairs, train_indices)),
        length_limits=tuple(_length_limits(pairs, train_indices, request.cache)),
        cache=request.cache,
        required_keywords=keywords,
    )


def held_out_pairs(data: PairsData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """A held-out split, as batches and as text."""
    name, prepared = prepared_split(open_pairs, data, form, request, split)
    examples = tuple(read_examples(request.cache, name))
    return EvaluationData(name, _pair_batches(prepared.shards, f"{name}.", request.batch_tokens), examples)


def pairs_of_file(
    data: PairsData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """The pairs of a table or of two parallel files."""
    rows = list(open_table(path, (data.source, data.target), SIDES, request.cache).rows())
    examples = examples_of_file(rows, path)
    shards = write_rows(rows, request.cache, SIDES, _largest_vocab(tokenizers), partial(_add_rows, tokenizers))
    return EvaluationData(path_name(path), _pair_batches(shards, "", request.batch_tokens), examples)


def _pair_dataset(shards: Mapping[str, TokenShard], prefix: str) -> PairDataset:
    return PairDataset(*(shards[f"{prefix}{side}"] for side in SIDES))


def _pair_batches(shards: Mapping[str, TokenShard], prefix: str, batch_tokens: int) -> HeldOutBatches:
    return held_out_batches(_pair_dataset(shards, prefix), batch_tokens, shard_units(shards[f"{prefix}target"]))


def _pair_splits(data: PairsData, cache: Path) -> TableSplits:
    columns = data.source, data.target
    splits = TableSplits.read(lambda path: [open_table(path, columns, SIDES, cache)], data.path, data.valid, data.test)
    if data.test is None and data.path == NORMALIZATION_CORPUS:
        splits.shares["test"] = min(_TEST_SHARE, (1 - sum(splits.shares.values())) / 2)
    return splits


def _prepare(data: PairsData, splits: TableSplits, request: OpenRequest) -> PreparationResult:
    request.log(f"preparing pairs: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    tokenizers = _train_tokenizers(data, splits)
    written = write_tables(splits, request.cache, SIDES, _largest_vocab(tokenizers), partial(_add_rows, tokenizers))
    return PreparationResult(tokenizers, written.facts, written.hashes, {"pairs": written.counts})


def _largest_vocab(tokenizers: TokenizerPair) -> int:
    return max(tokenizers.source.vocab, tokenizers.target.vocab)


def _train_tokenizers(data: PairsData, splits: TableSplits) -> TokenizerPair:
    def cells(side: int) -> Iterator[str]:
        return (row.cells[side] for row in splits.training_rows())

    if data.shared:
        texts = chain.from_iterable(row.cells for row in splits.training_rows())
        tokenizer = Tokenizer.train(data.tokenizer, texts, data.vocab)
        return TokenizerPair(tokenizer, tokenizer)
    source, target = (Tokenizer.train(data.tokenizer, cells(side), data.vocab) for side in (0, 1))
    return TokenizerPair(source, target)


def _add_rows(tokenizers: TokenizerPair, writers: ShardWriters, prefix: str, rows: list[TableRow]) -> None:
    source, target = ([row.cells[side] for row in rows] for side in (0, 1))
    for text, ids in zip(source, tokenizers.source.encode_many(source), strict=True):
        writers.shards[f"{prefix}source"].add(np.append(ids, tokenizers.source.eos), starts_document=True, text=text)
    bos, eos = tokenizers.target.bos, tokenizers.target.eos
    for text, ids in zip(target, tokenizers.target.encode_many(target), strict=True):
        writers.shards[f"{prefix}target"].add(np.concatenate([[bos], ids, [eos]]), starts_document=True, text=text)


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


PAIRS = register(
    DataKind(section=PairsData, forms=("pairs",), open=open_pairs, held_out=held_out_pairs, from_file=pairs_of_file)
)
