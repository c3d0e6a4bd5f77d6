"""Opening treebanks: split, tokenized into shards once, then read as batches of sentences of similar length."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from manyformer.base.errors import UserError
from manyformer.config import TreesData
from manyformer.data.batching.length_buckets import LengthBuckets, TaggedDataset, batches_in_order
from manyformer.data.pipeline.kind import OpenRequest, register
from manyformer.data.pipeline.opened import LengthLimit, UnlabelledData, UnlabelledInput
from manyformer.data.pipeline.splits import PathOrPaths, Splits, path_list
from manyformer.data.pipeline.table_pipeline import TablePipeline, split_rows, training_rows
from manyformer.data.storage.token_shards import ShardWriter, TokenShard
from manyformer.data.text.pair_tables import RowTable
from manyformer.data.text.table_files import TableRow
from manyformer.data.text.treebank import (
    LABEL_COLUMNS,
    NO_WORD,
    UNKNOWN_LABEL,
    TreebankSentence,
    WordTokens,
    annotated_lines,
    open_treebank,
)
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair, class_id, section_tokenizer
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.structures import NO_NODE, preorder_columns

SENTENCES_PER_BATCH = 64
"""Sentences whose labels are predicted together."""
TOKENS_PER_BATCH = 1 << 14
"""The most tokens of them, padded, unless a single sentence has more."""
MAX_TREE_NUMBER = 1 << 16
"""An upper bound of the words in a sentence, and so of its tree columns."""

_DIVIDED = "encoded in parts, because their tokens would join words, which have a label each"


class TreesPipeline(TablePipeline[TreesData]):
    """Sentences with trees for a tagger."""

    section = TreesData
    forms = ("tagged",)
    sides = ("tokens", "classes", "trees")
    prepared_settings = ("tokenizer", "vocab", "label")
    title = "trees"
    noun = "sentence"

    def open_sources(self, paths: PathOrPaths, split: str) -> list[RowTable]:
        return [open_treebank(path, self.data.label, self.request.cache) for path in path_list(paths)]

    def train_tokenizers(self, splits: Splits[RowTable]) -> TokenizerPair:
        # labels that occur only in held-out sentences are classes too: they count as errors in the scores
        labels = sorted({label for _, row in split_rows(splits) for label in TreebankSentence.from_row(row).labels})
        if len(labels) == 1:
            raise UserError(f"all words have the {self.data.label} {labels[0]!r}; a tagger needs at least two labels")
        forms = chain.from_iterable(TreebankSentence.from_row(row).forms for row in training_rows(splits))
        tokenizer = section_tokenizer(self.data, forms)
        return TokenizerPair(tokenizer, tokenizer, tuple(labels))

    def max_vocab(self) -> int:
        return max(self.tokenizers.source.vocab, MAX_TREE_NUMBER)

    def add_rows(self, writers: Sequence[ShardWriter], rows: Sequence[TableRow]) -> Sequence[int]:
        # in a shard 0 is no class; a word without a label has a target too, which marks the word's first token
        class_ids = {UNKNOWN_LABEL: 0} | self.tokenizers.class_ids()
        tokenizer = self.tokenizers.source
        reads_text = reads_running_text(self.data, tokenizer)
        lengths = []
        for row in rows:
            sentence = TreebankSentence.from_row(row)
            tokens = sentence.tokens(tokenizer, in_text=reads_text)
            if tokens.is_divided:
                self.note_row(self.noun, _DIVIDED, row)
            classes = [class_id(class_ids, label, row.location) + 1 for label in sentence.labels]
            for writer, column in zip(writers, _token_columns(tokens, classes, sentence.heads, tokenizer), strict=True):
                writer.add(column, starts_document=True)
            lengths.append(len(tokens.ids) + 2)
        return lengths

    def labels_of(self, row: TableRow) -> Sequence[str]:
        return TreebankSentence.from_row(row).labels

    def example_of(self, row: TableRow) -> Sequence[str]:
        sentence = TreebankSentence.from_row(row)
        return " ".join(sentence.forms), " ".join(sentence.labels)

    def token_limits(self) -> tuple[int, ...]:
        return self.tokenizers.source.vocab, len(self.tokenizers.labels or ()) + 1, MAX_TREE_NUMBER

    def dataset(self, shards: Sequence[TokenShard]) -> TaggedDataset:
        return TaggedDataset(*shards, pad=self.tokenizers.source.pad)

    def length_limits(self, plans: Mapping[str, LengthBuckets]) -> Iterator[LengthLimit]:
        remedy = "leave such ones out with data.max_length, or build a longer one"
        yield LengthLimit(plans["train"].max_length, "the longest training sentence", remedy)
        for name, plan in plans.items():
            if name != "train":
                remedy = "no held-out sentence is left out: build a longer model"
                yield LengthLimit(plan.max_length, f"the longest {name} sentence", remedy)

    def labels_title(self) -> str:
        return f"labels ({self.data.label})"

    def unlabelled(self, path: str) -> UnlabelledData:
        """The sentences of a file as batches in their order."""
        # without labels: a file to label may have none, or others
        treebank = open_treebank(path, None, self.request.cache)
        rows = list(treebank.rows())
        inputs = []
        for row, block in zip(rows, treebank.blocks(), strict=True):
            sentence = TreebankSentence.from_row(row)
            annotate = partial(annotated_lines, block, LABEL_COLUMNS[self.data.label])
            inputs.append(UnlabelledInput(sentence.in_text.text, tuple(sentence.forms), annotate=annotate))
        dataset = self.dataset(self.write_rows(rows))
        return UnlabelledData(inputs, batches_in_order(dataset, SENTENCES_PER_BATCH, TOKENS_PER_BATCH))


def reads_running_text(data: object, tokenizer: Tokenizer) -> bool:
    """Whether sentences are encoded as running text for a model of this data, rather than word by word."""
    # a tokenizer that was learned from a treebank has seen words one by one
    has_seen_words_alone = isinstance(data, TreesData) and data.tokenizer_of is None
    return tokenizer.reads_spaces and not has_seen_words_alone


def _token_columns(
    tokens: WordTokens, classes: list[int], heads: list[int], tokenizer: Tokenizer
) -> tuple[Any, Any, Any]:
    """Tokens, classes and tree columns of a sentence; a word's class is at its first token, its tree at every token."""
    # start and end token belong to no word and to no tree
    ids = np.concatenate([[tokenizer.bos], tokens.ids, [tokenizer.eos]])
    token_classes = np.zeros(len(ids), dtype=np.int64)
    token_classes[tokens.first + 1] = classes
    nodes = np.full((len(ids), 3), NO_NODE, dtype=np.int64)
    is_word = tokens.word_numbers != NO_WORD
    nodes[1:-1][is_word] = preorder_columns(heads)[tokens.word_numbers[is_word]]
    # one higher, since shards hold no negative numbers
    return ids, token_classes, (nodes + 1).ravel()


def unlabelled_sentences(data: TreesData, tokenizers: TokenizerPair, path: str, request: OpenRequest) -> UnlabelledData:
    """The sentences of a CoNLL-U file; their trees are used, their labels are not."""
    return TreesPipeline(data, "tagged", request, tokenizers).unlabelled(path)


TREES = register(TreesPipeline.limited_kind(unlabelled=unlabelled_sentences))
