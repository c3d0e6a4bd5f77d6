"""Opening treebanks: split, tokenized into shards once, then read as batches of sentences of similar length."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from manyformer.config import TreesData
from manyformer.data.cache_folder import PreparationResult, PreparedData, load_or_prepare
from manyformer.data.example_splits import (
    held_out_batches,
    select_training_examples,
    split_batches,
    tokenized_settings,
    write_rows,
    write_tables,
)
from manyformer.data.kind import DataKind, OpenRequest, prepared_split, register
from manyformer.data.length_buckets import batches_in_order
from manyformer.data.opened import (
    EvaluationData,
    EvaluationPath,
    LengthLimit,
    OpenedData,
    UnlabelledData,
    UnlabelledInput,
    path_name,
)
from manyformer.data.padded_examples import TaggedDataset
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import TableSplits, tables_by_path
from manyformer.data.table_files import TableRow
from manyformer.data.token_shards import ShardWriters, TokenShard
from manyformer.data.tokenizer import Tokenizer
from manyformer.data.treebank import LABEL_COLUMNS, UNKNOWN_LABEL, TreebankSentence, annotated_lines, open_treebank
from manyformer.dependency_trees import NO_NODE, preorder_columns
from manyformer.errors import UserError, suggest_names
from manyformer.type_aliases import IntArray

SHARD_NAMES = ("tokens", "classes", "trees")
"""The shards of each split."""
SENTENCES_PER_BATCH = 64
"""Sentences whose labels are predicted together."""
MAX_SENTENCE_WORDS = 1 << 16
"""An upper bound of the words in a sentence, and so of its tree columns."""


def open_trees(data: TreesData, form: str, request: OpenRequest) -> OpenedData:
    """Open sentences with trees for a tagger; `request.batch_tokens` bounds the padded tokens of a batch."""
    read = tables_by_path(lambda path: open_treebank(path, data.label, request.cache))
    splits = TableSplits.read(read, data.path, data.valid, data.test)
    settings = tokenized_settings(data, splits, label=data.label)
    prepared = load_or_prepare(request.cache, settings, lambda: _prepare(data, splits, request))
    tokenizers = prepared.tokenizers
    assert tokenizers.labels is not None
    datasets = {name: _tagged_dataset(prepared.shards, f"{name}.") for name in splits.names}
    lengths = datasets["train"].lengths
    train_indices = select_training_examples(lengths, request.batch_tokens, noun="sentence", max_length=data.max_length)
    return OpenedData(
        tokenizers=tokenizers,
        **split_batches(datasets, train_indices, request.batch_tokens, request.seed)._asdict(),
        summary_lines=tuple(_summary_lines(data, splits, prepared, len(lengths) - len(train_indices))),
        length_limits=tuple(_length_limits(datasets, train_indices)),
        cache=request.cache,
        required_keywords={"vocab": tokenizers.target.vocab, "classes": len(tokenizers.labels)},
    )


def held_out_trees(data: TreesData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The sentences of a held-out split."""
    name, prepared = prepared_split(open_trees, data, form, request, split)
    return EvaluationData(name, held_out_batches(_tagged_dataset(prepared.shards, f"{name}."), request.batch_tokens))


def trees_of_file(
    data: TreesData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """The sentences of treebank files, with the label ids of training."""
    paths = [path] if isinstance(path, str) else path
    rows = [row for file in paths for row in open_treebank(file, data.label, request.cache).rows()]
    if not rows:
        raise UserError(f"{path}: there is nothing in it")
    dataset = _dataset_of_rows(rows, tokenizers, request.cache)
    return EvaluationData(path_name(path), held_out_batches(dataset, request.batch_tokens))


def unlabelled_sentences(data: TreesData, tokenizers: TokenizerPair, path: str, request: OpenRequest) -> UnlabelledData:
    """The sentences of a CoNLL-U file; their trees are used, their labels are not."""
    treebank = open_treebank(path, None, request.cache)
    rows = list(treebank.rows())
    inputs = []
    for row, block in zip(rows, treebank.blocks(), strict=True):
        forms = tuple(TreebankSentence.from_row(row).forms)
        inputs.append(
            UnlabelledInput(" ".join(forms), forms, annotate=partial(annotated_lines, block, LABEL_COLUMNS[data.label]))
        )
    return UnlabelledData(
        inputs, batches_in_order(_dataset_of_rows(rows, tokenizers, request.cache), SENTENCES_PER_BATCH)
    )


def _dataset_of_rows(rows: Sequence[TableRow], tokenizers: TokenizerPair, scratch_dir: Path) -> TaggedDataset:
    """Sentences for a trained model, in the order of `rows`; their shards are written to `scratch_dir`."""
    vocab = max(tokenizers.source.vocab, MAX_SENTENCE_WORDS)
    return _tagged_dataset(write_rows(rows, scratch_dir, SHARD_NAMES, vocab, partial(_add_sentences, tokenizers)), "")


def _tagged_dataset(shards: Mapping[str, TokenShard], prefix: str) -> TaggedDataset:
    """The sentences of a split from its shards."""
    tokens, classes, trees = (shards[f"{prefix}{side}"] for side in SHARD_NAMES)
    return TaggedDataset(tokens, classes, trees)


def _prepare(data: TreesData, splits: TableSplits, request: OpenRequest) -> PreparationResult:
    request.log(f"preparing trees: {splits.tables['train'][0].name} ({data.tokenizer} tokens)")
    forms = chain.from_iterable(TreebankSentence.from_row(row).forms for row in splits.training_rows())
    tokenizer = Tokenizer.train(data.tokenizer, forms, data.vocab)
    # labels that occur only in held-out sentences are classes too: they count as errors in the scores
    labels = {label for _, row in splits.rows() for label in TreebankSentence.from_row(row).labels}
    if len(labels) < 2:
        raise UserError(f"all words have the {data.label} {min(labels)!r}; a tagger needs at least two labels")
    tokenizers = TokenizerPair(tokenizer, tokenizer, tuple(sorted(labels)))
    vocab, add_rows = max(tokenizer.vocab, MAX_SENTENCE_WORDS), partial(_add_sentences, tokenizers)
    written = write_tables(splits, request.cache, SHARD_NAMES, vocab, add_rows)
    return PreparationResult(tokenizers, written.facts, written.hashes, {"sentences": written.counts})


def _add_sentences(tokenizers: TokenizerPair, writers: ShardWriters, prefix: str, rows: Sequence[TableRow]) -> None:
    """Add sentences to the shards of a split. Raises UserError for a label that `tokenizers.labels` lacks."""
    assert tokenizers.labels is not None
    # a word without a label has a target too, which marks the word's first token
    class_ids = {UNKNOWN_LABEL: 1} | {label: number for number, label in enumerate(tokenizers.labels, 1)}
    sentences = [TreebankSentence.from_row(row) for row in rows]
    form_ids = iter(tokenizers.source.encode_many(list(chain.from_iterable(sentence.forms for sentence in sentences))))
    for row, sentence in zip(rows, sentences, strict=True):
        if unknown := next((label for label in sentence.labels if label not in class_ids), None):
            raise UserError(f"{row.location}: the label {unknown!r} is not known; {suggest_names(unknown, class_ids)}")
        ids = [next(form_ids) for _ in sentence.forms]
        classes = [class_ids[label] for label in sentence.labels]
        for side, column in zip(
            SHARD_NAMES, _token_columns(ids, classes, sentence.heads, tokenizers.source), strict=True
        ):
            writers.shards[f"{prefix}{side}"].add(column, starts_document=True)


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


TREES = register(
    DataKind(
        section=TreesData,
        forms=("tagged",),
        open=open_trees,
        held_out=held_out_trees,
        from_file=trees_of_file,
        unlabelled=unlabelled_sentences,
    )
)
