"""Opening treebanks: read, divided, tokenized into shards once, then batches of sentences of similar length."""

from collections.abc import Callable, Iterator, Sequence
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
from manyformer.data.ragged import IntArray
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, SplitRecorder, TableSplits
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardWriters, TokenShard, open_shard, writing_shards
from manyformer.data.tokenizer import Tokenizer
from manyformer.data.treebank import UNKNOWN, TreebankSentence, treebank
from manyformer.dependency_trees import NO_NODE, preorder_columns
from manyformer.errors import UserError, nearest

Say = Callable[[str], None]
SIDES = ("tokens", "classes", "trees")
"""The shards of each split."""
MOST_WORDS = 1 << 16
"""More words, and so more numbers in a tree, than any sentence has."""
# Sentences handled together.
_BLOCK = 2000


def open_trees(data: TreesData, *, batch_tokens: int, cache: Path, seed: int, say: Say) -> OpenedData:
    """Sentences with trees for a tagger; `batch_tokens` bounds the padded tokens of a batch."""
    splits = _splits(data, cache)
    asked: dict[str, Any] = {"kind": "trees", "tokenizer": data.tokenizer, "vocab": data.vocab, "label": data.label}
    asked |= {"shares": splits.shares, "stamps": splits.stamps(), "library": tokenizers.__version__}
    ready = load_or_prepare(cache, asked, lambda: _make(data, splits, cache, say))
    tagged = {name: tagged_of(ready.shards, f"{name}.") for name in splits.names}
    kept = np.flatnonzero(tagged["train"].lengths <= data.max_length)
    _refuse_little(tagged["train"].lengths[kept], batch_tokens, data.max_length)
    every = {name: LengthBuckets(one, np.arange(len(one.lengths)), batch_tokens) for name, one in tagged.items()}
    held = {name: HeldOutBatches(plan.fixed(), None) for name, plan in every.items() if name != "train"}
    return OpenedData(
        task="tagging",
        tokenizers=ready.tokenizers,
        train=Sampler(LengthBuckets(tagged["train"], kept, batch_tokens), seed),
        valid=held["valid"],
        test=held.get("test"),
        lines=tuple(_lines(data, splits, ready, len(tagged["train"].lengths) - len(kept))),
        spans=tuple(_spans(tagged, kept)),
        cache=cache,
    )


def tagged_of(shards: dict[str, TokenShard], prefix: str) -> TaggedDataset:
    """The sentences of a split from its shards."""
    tokens, classes, trees = (shards[f"{prefix}{side}"] for side in SIDES)
    return TaggedDataset(tokens, classes, trees)


def add_sentences(writers: ShardWriters, prefix: str, rows: Sequence[TableRow], made: TokenizerPair) -> None:
    """Sentences into the shards of a split. Raises UserError for a label that `made` does not know."""
    assert made.labels is not None
    # a word whose label nobody has asked for has a target as well: it shows where the word begins
    numbers = {UNKNOWN: 1} | {label: number for number, label in enumerate(made.labels, 1)}
    sentences = [TreebankSentence.of(row) for row in rows]
    pieces = iter(made.source.encode_many(list(chain.from_iterable(one.words for one in sentences))))
    for row, sentence in zip(rows, sentences, strict=True):
        if unknown := next((label for label in sentence.labels if label not in numbers), None):
            raise UserError(f"{row.where}: the label {unknown!r} is not known; {nearest(unknown, numbers)}")
        ids = [next(pieces) for _ in sentence.words]
        classes = [numbers[label] for label in sentence.labels]
        for side, column in zip(SIDES, _columns(ids, classes, sentence.heads, made.source), strict=True):
            writers.shards[f"{prefix}{side}"].add(column, begins=True)


def tagged_rows(rows: Sequence[TableRow], tokenizers: TokenizerPair, room: Path) -> TaggedDataset:
    """Sentences for a model that is there already, in their order; `room` is a folder for their shards."""
    with writing_shards(room, SIDES, max(tokenizers.source.vocab, MOST_WORDS)) as writers:
        add_sentences(writers, "", rows, tokenizers)
    return tagged_of({side: open_shard(room, side, facts) for side, facts in writers.facts.items()}, "")


def _columns(ids: list[Any], classes: list[int], heads: list[int], words: Tokenizer) -> tuple[Any, Any, Any]:
    """Tokens, classes and tree numbers of a sentence; a word has its class at its first token, its tree at all."""
    counts = np.array([len(one) for one in ids])
    begins = np.cumsum(counts) - counts + 1
    tokens = np.concatenate([[words.bos], *ids, [words.eos]])
    spread = np.zeros(len(tokens), dtype=np.int64)
    # a word of no tokens (there are tokenizers that drop characters) has nothing to stand at
    spread[begins[counts > 0]] = np.array(classes)[counts > 0]
    nodes = np.full((len(tokens), 3), NO_NODE, dtype=np.int64)
    nodes[1:-1] = np.repeat(preorder_columns(heads), counts, axis=0)
    return tokens, spread, (nodes + 1).ravel()


def _splits(data: TreesData, cache: Path) -> TableSplits:
    def read(paths: PathOrPaths) -> list[RowTable]:
        each = [paths] if isinstance(paths, str) else paths
        return [treebank(path, data.label, cache) for path in each]

    return TableSplits.read(read, data.path, data.valid, data.test)


def _make(data: TreesData, splits: TableSplits, cache: Path, say: Say) -> PreparationResult:
    say(f"preparing trees: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    words = chain.from_iterable(TreebankSentence.of(row).words for row in splits.training())
    tokenizer = Tokenizer.train(data.tokenizer, words, data.vocab)
    # held-out sentences may have labels that no training sentence has: they count, as answers that nobody learns
    labels = {label for _, row in splits.rows() for label in TreebankSentence.of(row).labels}
    if len(labels) < 2:
        raise UserError(f"all words have the {data.label} {min(labels)!r}; a tagger needs at least two labels")
    made = TokenizerPair(tokenizer, tokenizer, tuple(sorted(labels)))
    shards = [f"{name}.{side}" for name in splits.names for side in SIDES]
    with ExitStack() as stack:
        writers = stack.enter_context(writing_shards(cache, shards, max(tokenizer.vocab, MOST_WORDS)))
        record = SplitRecorder(splits, cache, stack)
        for name, rows in record.blocks(_BLOCK):
            add_sentences(writers, f"{name}.", rows, made)
        hashes = record.hashes()
    return PreparationResult(made, writers.facts, hashes, {"sentences": record.counts})


def _refuse_little(lengths: IntArray, batch_tokens: int, max_length: int) -> None:
    if not len(lengths):
        raise UserError(f"no training sentence is as short as data.longest allows ({max_length} tokens); set it higher")
    if int(lengths.max()) > batch_tokens:
        raise UserError(
            f"the longest training sentence has {int(lengths.max())} tokens, more than a batch of {batch_tokens} "
            "(batch.tokens); set batch.tokens higher or data.longest lower"
        )
    if int(lengths.sum()) < batch_tokens:
        raise UserError(
            f"the {len(lengths):,} training sentences have {int(lengths.sum()):,} tokens, fewer than one batch of "
            f"{batch_tokens:,} (batch.tokens); give more sentences or set batch.tokens lower"
        )


def _spans(tagged: dict[str, TaggedDataset], kept: IntArray) -> Iterator[LengthLimit]:
    max_length = int(tagged["train"].lengths[kept].max())
    yield LengthLimit(
        max_length, "the longest training sentence", "leave such ones out with data.longest, or build a longer one"
    )
    for name, one in tagged.items():
        if name != "train":
            mend = "no held-out sentence is left out: build a longer model"
            yield LengthLimit(int(one.lengths.max()), f"the longest {name} sentence", mend)


def _lines(data: TreesData, splits: TableSplits, ready: PreparedData, left_out: int) -> Iterator[str]:
    labels = ready.tokenizers.labels
    assert labels is not None
    yield f"trees: {', '.join(one.name for one in splits.tables['train'])}; {len(labels):,} labels ({data.label})"
    yield f"tokens: {data.tokenizer}, vocabulary {ready.tokenizers.target.vocab:,}"
    yield "; ".join(f"{name}: {count:,} sentences" for name, count in ready.counts["sentences"].items())
    if left_out:
        yield f"{left_out:,} training sentences longer than {data.max_length} tokens left out"
