"""Opening treebanks: split, tokenized into shards once, then read as batches of sentences of similar length."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from manyformer.config import TreesData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.length_buckets import LengthBuckets
from manyformer.data.opened import LengthLimit, OpenedData
from manyformer.data.padded_examples import TaggedDataset
from manyformer.data.pair_tables import RowTable
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, SplitRecorder, TableSplits
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardWriters, TokenShard, open_shard, write_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.data.treebank import UNKNOWN_LABEL, TreebankSentence, open_treebank
from manyformer.dependency_trees import NO_NODE, preorder_columns
from manyformer.errors import UserError, suggest_names
from manyformer.type_aliases import IntArray, LogFn

SHARD_NAMES = ("tokens", "classes", "trees")
"""The shards of each split."""
MAX_SENTENCE_WORDS = 1 << 16
"""An upper bound of the words in a sentence, and so of its tree columns."""
# Sentences handled together.
_BLOCK_ROWS = 2000


def open_trees(data: TreesData, *, batch_tokens: int, cache: Path, seed: int, log: LogFn) -> OpenedData:
    """Open sentences with trees for a tagger; `batch_tokens` bounds the padded tokens of a batch."""
    splits = _tree_splits(data, cache)
    settings: dict[str, Any] = {"kind": "trees", "tokenizer": data.tokenizer, "vocab": data.vocab, "label": data.label}
    settings |= {"shares": splits.shares, "stamps": splits.stamps(), "library": tokenizers.__version__}
    prepared = load_or_prepare(cache, settings, lambda: _prepare(data, splits, cache, log))
    datasets = {name: tagged_dataset(prepared.shards, f"{name}.") for name in splits.names}
    train_indices = np.flatnonzero(datasets["train"].lengths <= data.max_length)
    _check_batch_size(datasets["train"].lengths[train_indices], batch_tokens, data.max_length)
    plans = {
        name: LengthBuckets(dataset, np.arange(len(dataset.lengths)), batch_tokens)
        for name, dataset in datasets.items()
    }
    held_out = {name: HeldOutBatches(plan.fixed_epoch(), None) for name, plan in plans.items() if name != "train"}
    return OpenedData(
        task="tagging",
        tokenizers=prepared.tokenizers,
        train=Sampler(LengthBuckets(datasets["train"], train_indices, batch_tokens), seed),
        valid=held_out["valid"],
        test=held_out.get("test"),
        summary_lines=tuple(
            _summary_lines(data, splits, prepared, len(datasets["train"].lengths) - len(train_indices))
        ),
        length_limits=tuple(_length_limits(datasets, train_indices)),
        cache=cache,
    )


def tagged_dataset(shards: dict[str, TokenShard], prefix: str) -> TaggedDataset:
    """The sentences of a split from its shards."""
    tokens, classes, trees = (shards[f"{prefix}{side}"] for side in SHARD_NAMES)
    return TaggedDataset(tokens, classes, trees)


def add_sentences(writers: ShardWriters, prefix: str, rows: Sequence[TableRow], tokenizer_pair: TokenizerPair) -> None:
    """Add sentences to the shards of a split. Raises UserError for a label that `tokenizer_pair.labels` lacks."""
    assert tokenizer_pair.labels is not None
    # a word without a label has a target too, which marks the word's first token
    class_ids = {UNKNOWN_LABEL: 1} | {label: number for number, label in enumerate(tokenizer_pair.labels, 1)}
    sentences = [TreebankSentence.from_row(row) for row in rows]
    form_ids = iter(
        tokenizer_pair.source.encode_many(list(chain.from_iterable(sentence.forms for sentence in sentences)))
    )
    for row, sentence in zip(rows, sentences, strict=True):
        if unknown := next((label for label in sentence.labels if label not in class_ids), None):
            raise UserError(f"{row.location}: the label {unknown!r} is not known; {suggest_names(unknown, class_ids)}")
        ids = [next(form_ids) for _ in sentence.forms]
        classes = [class_ids[label] for label in sentence.labels]
        for side, column in zip(
            SHARD_NAMES, _token_columns(ids, classes, sentence.heads, tokenizer_pair.source), strict=True
        ):
            writers.shards[f"{prefix}{side}"].add(column, starts_document=True)


def tagged_dataset_of_rows(rows: Sequence[TableRow], tokenizers: TokenizerPair, scratch_dir: Path) -> TaggedDataset:
    """Sentences for a trained model, in the order of `rows`; their shards are written to `scratch_dir`."""
    with write_shards(scratch_dir, SHARD_NAMES, max(tokenizers.source.vocab, MAX_SENTENCE_WORDS)) as writers:
        add_sentences(writers, "", rows, tokenizers)
    return tagged_dataset({side: open_shard(scratch_dir, side, facts) for side, facts in writers.facts.items()}, "")


def _token_columns(ids: list[Any], classes: list[int], heads: list[int], tokenizer: Tokenizer) -> tuple[Any, Any, Any]:
    """Tokens, classes and tree columns of a sentence; a word's class is at its first token, its tree at every token."""
    counts = np.array([len(form_ids) for form_ids in ids])
    starts = np.cumsum(counts) - counts + 1
    tokens = np.concatenate([[tokenizer.bos], *ids, [tokenizer.eos]])
    token_classes = np.zeros(len(tokens), dtype=np.int64)
    # a word without tokens (some tokenizers drop characters) has no position for its class
    token_classes[starts[counts > 0]] = np.array(classes)[counts > 0]
    nodes = np.full((len(tokens), 3), NO_NODE, dtype=np.int64)
    nodes[1:-1] = np.repeat(preorder_columns(heads), counts, axis=0)
    return tokens, token_classes, (nodes + 1).ravel()


def _tree_splits(data: TreesData, cache: Path) -> TableSplits:
    def read(paths: PathOrPaths) -> list[RowTable]:
        path_list = [paths] if isinstance(paths, str) else paths
        return [open_treebank(path, data.label, cache) for path in path_list]

    return TableSplits.read(read, data.path, data.valid, data.test)


def _prepare(data: TreesData, splits: TableSplits, cache: Path, log: LogFn) -> PreparationResult:
    log(f"preparing trees: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    forms = chain.from_iterable(TreebankSentence.from_row(row).forms for row in splits.training_rows())
    tokenizer = Tokenizer.train(data.tokenizer, forms, data.vocab)
    # labels that occur only in held-out sentences are classes too: they count as errors in the scores
    labels = {label for _, row in splits.rows() for label in TreebankSentence.from_row(row).labels}
    if len(labels) < 2:
        raise UserError(f"all words have the {data.label} {min(labels)!r}; a tagger needs at least two labels")
    tokenizer_pair = TokenizerPair(tokenizer, tokenizer, tuple(sorted(labels)))
    shards = [f"{name}.{side}" for name in splits.names for side in SHARD_NAMES]
    with ExitStack() as stack:
        writers = stack.enter_context(write_shards(cache, shards, max(tokenizer.vocab, MAX_SENTENCE_WORDS)))
        record = SplitRecorder(splits, cache, stack)
        for name, rows in record.blocks(_BLOCK_ROWS):
            add_sentences(writers, f"{name}.", rows, tokenizer_pair)
        hashes = record.hashes()
    return PreparationResult(tokenizer_pair, writers.facts, hashes, {"sentences": record.counts})


def _check_batch_size(lengths: IntArray, batch_tokens: int, max_length: int) -> None:
    if not len(lengths):
        raise UserError(
            f"no training sentence is as short as data.max_length allows ({max_length} tokens); set it higher"
        )
    if int(lengths.max()) > batch_tokens:
        raise UserError(
            f"the longest training sentence has {int(lengths.max())} tokens, more than a batch of {batch_tokens} "
            "(batch.tokens); set batch.tokens higher or data.max_length lower"
        )
    if int(lengths.sum()) < batch_tokens:
        raise UserError(
            f"the {len(lengths):,} training sentences have {int(lengths.sum()):,} tokens, fewer than one batch of "
            f"{batch_tokens:,} (batch.tokens); give more sentences or set batch.tokens lower"
        )


def _length_limits(datasets: dict[str, TaggedDataset], train_indices: IntArray) -> Iterator[LengthLimit]:
    max_length = int(datasets["train"].lengths[train_indices].max())
    yield LengthLimit(
        max_length, "the longest training sentence", "leave such ones out with data.max_length, or build a longer one"
    )
    for name, dataset in datasets.items():
        if name != "train":
            remedy = "no held-out sentence is left out: build a longer model"
            yield LengthLimit(int(dataset.lengths.max()), f"the longest {name} sentence", remedy)


def _summary_lines(data: TreesData, splits: TableSplits, prepared: PreparedData, left_out: int) -> Iterator[str]:
    labels = prepared.tokenizers.labels
    assert labels is not None
    yield f"trees: {', '.join(table.name for table in splits.tables['train'])}; {len(labels):,} labels ({data.label})"
    yield f"tokens: {data.tokenizer}, vocabulary {prepared.tokenizers.target.vocab:,}"
    yield "; ".join(f"{name}: {count:,} sentences" for name, count in prepared.counts["sentences"].items())
    if left_out:
        yield f"{left_out:,} training sentences longer than {data.max_length} tokens left out"
