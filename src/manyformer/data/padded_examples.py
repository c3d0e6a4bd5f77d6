"""Data sets of pairs, labelled texts and tagged sentences that collate shards into padded batches."""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, ClassificationBatch, Seq2SeqBatch, TaggingBatch
from manyformer.data.length_buckets import SequenceDataset
from manyformer.data.ragged import pad_ragged
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.token_shards import TokenShard
from manyformer.data.tokenizer import Tokenizer
from manyformer.type_aliases import IntArray


@final
class PairDataset(SequenceDataset):
    """Pairs: source x as x + EOS and target y as BOS + y + EOS; the length of a pair is that of its longer input."""

    def __init__(self, source: TokenShard, target: TokenShard, *, tokenizers: TokenizerPair) -> None:
        assert source.facts.documents == target.facts.documents
        self._source, self._target = source, target
        self._source_pad, self._target_pad = tokenizers.source.pad, tokenizers.target.pad
        lengths = np.stack([source.lengths, target.lengths - 1])
        self.lengths, self.tie_breakers = lengths.max(0), lengths.sum(0)
        self.fingerprint = f"{source.facts.sha256[:12]}-{target.facts.sha256[:12]}"

    def make_batch(self, indices: IntArray) -> Seq2SeqBatch:
        source, source_segments = gather_padded(self._source, indices, pad=self._source_pad)
        target, target_segments = gather_padded(self._target, indices, pad=self._target_pad, skip_last=1)
        targets, _ = gather_padded(self._target, indices, pad=IGNORE_INDEX, skip_first=1)
        return Seq2SeqBatch(source, target, targets, source_segments, target_segments)


@final
class LabelledDataset(SequenceDataset):
    """Texts as BOS + x + EOS with their class ids; the shard holds them truncated to the maximum length."""

    def __init__(self, texts: TokenShard, labels: TokenShard, *, pad: int) -> None:
        assert texts.facts.documents == labels.facts.tokens
        self._texts, self._pad = texts, pad
        self._labels = np.asarray(labels.tokens, dtype=np.int64)
        self.lengths = self.tie_breakers = texts.lengths
        self.fingerprint = f"{texts.facts.sha256[:12]}-{labels.facts.sha256[:12]}"

    def make_batch(self, indices: IntArray) -> ClassificationBatch:
        tokens, segments = gather_padded(self._texts, indices, pad=self._pad)
        return ClassificationBatch(tokens, torch.from_numpy(self._labels[indices]), segments)


@final
class TaggedDataset(SequenceDataset):
    """Sentences as BOS + x + EOS, with the class of each word at its first token and three tree columns per token.

    In the shards classes and tree columns are one higher, so that 0 means none.
    """

    def __init__(self, tokens: TokenShard, classes: TokenShard, trees: TokenShard, *, pad: int) -> None:
        assert 3 * tokens.facts.tokens == 3 * classes.facts.tokens == trees.facts.tokens
        self._tokens, self._classes, self._trees, self._pad = tokens, classes, trees, pad
        self.lengths = self.tie_breakers = tokens.lengths
        self.fingerprint = "-".join(shard.facts.sha256[:12] for shard in (tokens, classes, trees))

    def make_batch(self, indices: IntArray) -> TaggingBatch:
        tokens, segments = gather_padded(self._tokens, indices, pad=self._pad)
        classes, _ = gather_padded(self._classes, indices, pad=0)
        trees, _ = gather_padded(self._trees, indices, pad=0)
        targets = torch.where(classes == 0, IGNORE_INDEX, classes - 1)
        return TaggingBatch(tokens, targets, segments, trees.view(*tokens.shape, 3) - 1)


@final
class EncodedTexts:
    """The token ids of texts and their tokenizer; `lengths` are without start and end token."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = tokenizer.encode_many(texts)
        self.lengths = np.array([len(tokens) for tokens in ids], dtype=np.int64)
        self._flat = np.concatenate([np.zeros(0, dtype=np.int32), *ids])
        self._starts = self.lengths.cumsum() - self.lengths

    def rows(self, texts: IntArray) -> tuple[IntArray, IntArray]:
        """The tokens of texts, padded on the right, and their lengths; text -1 is empty."""
        exists = texts >= 0
        starts, lengths = self._starts[texts] * exists, self.lengths[texts] * exists
        width = int(lengths.max(initial=0))
        return pad_ragged(self._flat, starts, lengths, width=width, fill=self.tokenizer.pad), lengths

    def targets(self, texts: IntArray) -> tuple[Tensor, Tensor, Tensor | None]:
        """BOS + y and y + EOS for the tokens y of each text, as `target` and `targets` of a pair, and segment ids.

        The segment ids (0, and -1 at padding) are None if no text is padded."""
        tokens, lengths = self.rows(texts)
        target = np.pad(tokens, ((0, 0), (1, 0)), constant_values=self.tokenizer.bos)
        columns = np.arange(target.shape[1])
        ended = np.where(columns == lengths[:, None], self.tokenizer.eos, np.pad(tokens, ((0, 0), (0, 1))))
        is_padding = columns > lengths[:, None]
        targets = torch.from_numpy(np.where(is_padding, IGNORE_INDEX, ended))
        segments = torch.from_numpy(-is_padding.astype(np.int64)) if is_padding.any() else None
        return torch.from_numpy(target), targets, segments


def gather_padded(
    shard: TokenShard, indices: IntArray, *, pad: int, skip_first: int = 0, skip_last: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Documents without their first `skip_first` and last `skip_last` tokens, padded on the right, and segment ids.

    The segment ids (0, and -1 at padding) are None if no document is padded.
    """
    starts = shard.offsets[indices] + skip_first
    lengths = shard.offsets[indices + 1] - skip_last - starts
    width = int(lengths.max())
    tokens = torch.from_numpy(pad_ragged(shard.tokens, starts, lengths, width=width, fill=pad))
    if int(lengths.min()) == width:
        return tokens, None
    is_padding = np.arange(width) >= lengths[:, None]
    return tokens, torch.from_numpy(-is_padding.astype(np.int64))
