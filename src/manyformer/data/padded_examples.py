"""Pairs, labelled texts and sentences with trees, from shards to padded batches."""

from typing import final

import numpy as np
import torch
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, ClassificationBatch, Seq2SeqBatch, TaggingBatch
from manyformer.data.length_buckets import SequenceDataset
from manyformer.data.ragged import IntArray, padded
from manyformer.data.token_shards import TokenShard
from manyformer.data.tokenizer import Tokenizer


@final
class PairDataset(SequenceDataset):
    """Source x as x + EOS and target y as BOS + y + EOS; the cost of a pair is its longer side as the model sees it."""

    def __init__(self, source: TokenShard, target: TokenShard) -> None:
        assert source.facts.documents == target.facts.documents
        self._source, self._target = source, target
        sides = np.stack([source.lengths, target.lengths - 1])
        self.lengths, self.ties = sides.max(0), sides.sum(0)
        self.fingerprint = f"{source.facts.sha256[:12]}-{target.facts.sha256[:12]}"

    def make(self, numbers: IntArray) -> Seq2SeqBatch:
        source, source_segments = _side(self._source, numbers, pad=Tokenizer.pad)
        target, target_segments = _side(self._target, numbers, pad=Tokenizer.pad, last=1)
        targets, _ = _side(self._target, numbers, pad=IGNORE_INDEX, first=1)
        return Seq2SeqBatch(source, target, targets, source_segments, target_segments)


@final
class LabelledDataset(SequenceDataset):
    """Texts as BOS + x + EOS, cut to `longest` tokens (the last of which stays EOS), with the number of their class."""

    def __init__(self, texts: TokenShard, labels: TokenShard) -> None:
        assert texts.facts.documents == labels.facts.tokens
        self._texts = texts
        self._labels = np.asarray(labels.tokens, dtype=np.int64)
        self.lengths = self.ties = texts.lengths
        self.fingerprint = f"{texts.facts.sha256[:12]}-{labels.facts.sha256[:12]}"

    def make(self, numbers: IntArray) -> ClassificationBatch:
        tokens, segments = _side(self._texts, numbers, pad=Tokenizer.pad)
        return ClassificationBatch(tokens, torch.from_numpy(self._labels[numbers]), segments)


@final
class TaggedDataset(SequenceDataset):
    """Sentences as BOS + x + EOS, the class of each word at its first token, and three numbers a token in its tree.

    In their shards classes and tree numbers are one higher, so that 0 stands for none.
    """

    def __init__(self, tokens: TokenShard, classes: TokenShard, trees: TokenShard) -> None:
        assert 3 * tokens.facts.tokens == 3 * classes.facts.tokens == trees.facts.tokens
        self._tokens, self._classes, self._trees = tokens, classes, trees
        self.lengths = self.ties = tokens.lengths
        self.fingerprint = "-".join(shard.facts.sha256[:12] for shard in (tokens, classes, trees))

    def make(self, numbers: IntArray) -> TaggingBatch:
        tokens, segments = _side(self._tokens, numbers, pad=Tokenizer.pad)
        classes, _ = _side(self._classes, numbers, pad=0)
        trees, _ = _side(self._trees, numbers, pad=0)
        targets = torch.where(classes == 0, IGNORE_INDEX, classes - 1)
        return TaggingBatch(tokens, targets, segments, trees.view(*tokens.shape, 3) - 1)


def _side(
    shard: TokenShard, numbers: IntArray, *, pad: int, first: int = 0, last: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Documents less their `first` and `last` tokens, padded at the right, and segments where any is padded."""
    starts = shard.offsets[numbers] + first
    lengths = shard.offsets[numbers + 1] - last - starts
    width = int(lengths.max())
    tokens = torch.from_numpy(padded(shard.tokens, starts, lengths, width=width, fill=pad))
    if int(lengths.min()) == width:
        return tokens, None
    beyond = np.arange(width) >= lengths[:, None]
    return tokens, torch.from_numpy(-beyond.astype(np.int64))
