"""Data sets of texts: pairs, labelled texts, tagged sentences and questions, whose shards become padded batches."""

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, AnswerSpanBatch, ClassificationBatch, Seq2SeqBatch, TaggingBatch
from manyformer.core import PADDING_SEGMENT
from manyformer.data.length_buckets import SequenceDataset
from manyformer.data.row_layouts import pad_ragged
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.token_shards import TokenShard
from manyformer.data.tokenizer import Tokenizer
from manyformer.two_texts import first_text_roles
from manyformer.type_aliases import IntArray


@final
class PairDataset(SequenceDataset):
    """Pairs: source x as x + EOS and target y as BOS + y + EOS; the length of a pair is that of its longer input."""

    def __init__(self, source: TokenShard, target: TokenShard, *, tokenizers: TokenizerPair) -> None:
        assert source.facts.documents == target.facts.documents
        self._source = source
        self._target = target
        self._source_pad = tokenizers.source.pad
        self._target_pad = tokenizers.target.pad
        lengths = np.stack([source.lengths, target.lengths - 1])
        self.lengths = lengths.max(0)
        self.tie_breakers = lengths.sum(0)
        self.fingerprint = f"{source.facts.sha256[:12]}-{target.facts.sha256[:12]}"

    def make_batch(self, indices: IntArray) -> Seq2SeqBatch:
        source, source_segments = gather_padded(self._source, indices, pad=self._source_pad)
        target, target_segments = gather_padded(self._target, indices, pad=self._target_pad, skip_last=1)
        targets, _ = gather_padded(self._target, indices, pad=IGNORE_INDEX, skip_first=1)
        return Seq2SeqBatch(source, target, targets, source_segments, target_segments)


class TokenRows(SequenceDataset):
    """Rows of tokens, framed and cut in their shard, with what other shards hold for each row or each of its tokens."""

    def __init__(self, tokens: TokenShard, *others: TokenShard, pad: int) -> None:
        assert {shard.facts.documents for shard in others} == {tokens.facts.documents}
        self._tokens = tokens
        self._others = others
        self._pad = pad
        self.lengths = self.tie_breakers = tokens.lengths
        self.fingerprint = "-".join(shard.facts.sha256[:12] for shard in (tokens, *others))

    def rows(self, indices: IntArray, *fills: int) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The padded tokens, their segment ids, and what the other shards hold, each padded with its own number."""
        tokens, segments = gather_padded(self._tokens, indices, pad=self._pad)
        others = zip(self._others, fills, strict=True)
        return tokens, segments, [gather_padded(shard, indices, pad=fill)[0] for shard, fill in others]


@final
class LabelledDataset(TokenRows):
    """Texts with a class each."""

    def make_batch(self, indices: IntArray) -> ClassificationBatch:
        tokens, segments = gather_padded(self._tokens, indices, pad=self._pad)
        labels = self._others[0].tokens[indices].astype(np.int64)
        return ClassificationBatch(tokens, torch.from_numpy(labels), segments)


@final
class TaggedDataset(TokenRows):
    """Sentences with the class of each word at its first token and three tree columns for each token.

    In the shards classes and tree columns are one higher, so that 0 means none.
    """

    def make_batch(self, indices: IntArray) -> TaggingBatch:
        tokens, segments, (classes, trees) = self.rows(indices, 0, 0)
        targets = torch.where(classes == 0, IGNORE_INDEX, classes - 1)
        return TaggingBatch(tokens, targets, segments, trees.view(*tokens.shape, 3) - 1)


@final
class SentencePairDataset(TokenRows):
    """Pairs of sentences with the part of each token, and a class each."""

    def make_batch(self, indices: IntArray) -> ClassificationBatch:
        tokens, segments, (parts, labels) = self.rows(indices, PADDING_SEGMENT, 0)
        return ClassificationBatch(tokens, labels[:, 0], segments, None, parts)


@final
class QuestionDataset(TokenRows):
    """Questions and documents with the part of each token, and the two ends of an answer.

    The tokens of the question may be global."""

    def __init__(self, shards: Sequence[TokenShard], *, pad: int, has_global_question: bool) -> None:
        super().__init__(*shards, pad=pad)
        self._has_global_question = has_global_question

    def make_batch(self, indices: IntArray) -> AnswerSpanBatch:
        tokens, segments, (parts, ends) = self.rows(indices, PADDING_SEGMENT, 0)
        roles = None
        if self._has_global_question:
            roles = first_text_roles(parts)
        return AnswerSpanBatch(tokens, ends, segments, roles, parts)


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
        starts = self._starts[texts] * exists
        lengths = self.lengths[texts] * exists
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
        segments = None
        if is_padding.any():
            segments = torch.from_numpy(-is_padding.astype(np.int64))
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
