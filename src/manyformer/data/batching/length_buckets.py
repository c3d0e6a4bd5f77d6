"""Data sets of examples with known lengths, and batches of similar length within a budget of padded tokens."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.data.batching.epochs import FIXED_SEED, Epoch, FixedEpochPlan, HeldOutBatches, random_generator
from manyformer.data.batching.row_layouts import pad_ragged
from manyformer.data.storage.token_shards import TokenShard
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizers.tokenizer import Tokenizer
from manyformer.nn.batches import IGNORE_INDEX, AnswerSpanBatch, Batch, ClassificationBatch, Seq2SeqBatch, TaggingBatch
from manyformer.nn.batches.two_texts import first_text_roles
from manyformer.nn.core import PADDING_SEGMENT


class SequenceDataset(ABC):
    """A data set of examples with known lengths that can be collated into batches."""

    lengths: IntArray
    """The length of each example, for pairs that of the longer side."""
    tie_breakers: IntArray
    """A second sort key for examples of equal length, so that the shorter sides of a batch have similar lengths."""
    fingerprint: str

    @abstractmethod
    def make_batch(self, indices: IntArray) -> Batch:
        """A batch of the examples at these indices, in this order."""


def batches_in_order(dataset: SequenceDataset, rows: int, budget: int | None = None) -> Iterator[Batch]:
    """All examples in their order: at most `rows` in a batch, and `budget` padded tokens unless one alone has more."""
    start = longest = 0
    for number, length in enumerate(dataset.lengths.tolist()):
        longest = max(longest, length)
        # without sorting: results must come in the order of the inputs
        count = number - start
        if count and (count == rows or (budget is not None and (count + 1) * longest > budget)):
            yield dataset.make_batch(np.arange(start, number))
            start = number
            longest = length
    if start < len(dataset.lengths):
        yield dataset.make_batch(np.arange(start, len(dataset.lengths)))


def held_out_batches(examples: SequenceDataset, batch_tokens: int) -> HeldOutBatches:
    """All examples in a fixed order, whose targets do not encode a text."""
    # by buckets too, so that scoring wastes no more on padding than training
    return HeldOutBatches(LengthBuckets(examples, batch_tokens).fixed_epoch(), None)


@final
class LengthBuckets(FixedEpochPlan):
    """Batches of at most `budget` padded tokens (rows times the longest length), with at least one row each.

    `indices` are those of the examples to read, by default all.
    """

    def __init__(self, examples: SequenceDataset, budget: int, indices: IntArray | None = None) -> None:
        self.examples = examples
        self._budget = budget
        if indices is None:
            self.indices = np.arange(len(examples.lengths))
        else:
            self.indices = indices
        self.fingerprint = f"{examples.fingerprint}-{len(self.indices)}-{budget}"

    @property
    def max_length(self) -> int:
        """The length of the longest example that is read."""
        return int(self.examples.lengths[self.indices].max())

    def epoch(self, seed: int, number: int) -> "BucketEpoch":
        random = random_generator(seed, number)
        return BucketEpoch(self.examples, random.permutation(self.indices), self._budget, random)

    def fixed_epoch(self) -> "BucketEpoch":
        """The fixed epoch of held-out data, shuffled so that its first batches represent all of them."""
        return BucketEpoch(self.examples, self.indices, self._budget, random_generator(FIXED_SEED))


class BucketEpoch(Epoch):
    """An epoch of buckets of examples of similar length, in an order drawn from `random`."""

    def __init__(self, examples: SequenceDataset, indices: IntArray, budget: int, random: np.random.Generator) -> None:
        self._examples = examples
        # a stable sort, which preserves the shuffled order of equal lengths
        self._indices = indices[np.lexsort((examples.tie_breakers[indices], examples.lengths[indices]))]
        self._bounds = bucket_bounds(examples.lengths[self._indices], budget)
        # buckets ascend in length, and training on them in that order would be a curriculum
        self._order = random.permutation(len(self._bounds) - 1)

    def __len__(self) -> int:
        return len(self._order)

    def batch(self, number: int) -> Batch:
        bucket = self._order[number]
        return self._examples.make_batch(self._indices[self._bounds[bucket] : self._bounds[bucket + 1]])


def training_buckets(
    examples: SequenceDataset, batch_tokens: int, *, noun: str, max_length: int, unit: str = "tokens"
) -> LengthBuckets:
    """Batches of the training examples of at most `max_length` tokens. Raises UserError if they fill no batch."""
    # longer examples stay in the shard, so that another max_length needs no new preparation
    buckets = LengthBuckets(examples, batch_tokens, np.flatnonzero(examples.lengths <= max_length))
    count = len(buckets.indices)
    if not count:
        raise UserError(
            f"no training {noun} is as short as data.max_length allows ({max_length} {unit}); set it higher"
        )
    if buckets.max_length > batch_tokens:
        raise UserError(
            f"the longest training {noun} has {buckets.max_length} {unit}, more than a batch of {batch_tokens} "
            "(batch.tokens); set batch.tokens higher or data.max_length lower"
        )
    total = int(examples.lengths[buckets.indices].sum())
    check_fills_batch(total, batch_tokens, f"the {count:,} training {noun}s have", f"{noun}s")
    return buckets


def check_fills_batch(
    total: int, batch_tokens: int, subject_and_verb: str, source: str, *, unit: str = "tokens"
) -> None:
    """Raise UserError if the training data does not fill one batch."""
    if total < batch_tokens:
        raise UserError(
            f"{subject_and_verb} {total:,} {unit}, fewer than one batch of {batch_tokens:,} (batch.tokens); "
            f"give more {source} or set batch.tokens lower"
        )


def bucket_bounds(lengths: IntArray, budget: int) -> IntArray:
    """The bounds of batches in ascending `lengths`: each is the longest with rows times last length within `budget`."""
    # greedy: each bucket takes as many of the sorted examples as fit
    bounds = [0]
    while bounds[-1] < len(lengths):
        start = bounds[-1]
        # the padded size increases with the stop index, so the last one that fits is found by bisection
        stops = range(start + 1, len(lengths) + 1)
        rows = bisect_right(stops, budget, key=lambda stop: (stop - start) * int(lengths[stop - 1]))
        bounds.append(start + max(1, rows))
    return np.array(bounds)


@final
class PairDataset(SequenceDataset):
    """Pairs: source x as x + EOS and target y as BOS + y + EOS; the length of a pair is that of its longer input."""

    def __init__(self, source: TokenShard, target: TokenShard, *, tokenizers: TokenizerPair) -> None:
        assert source.facts.documents == target.facts.documents
        self._source = source
        self._target = target
        self._source_pad = tokenizers.source.pad
        self._target_pad = tokenizers.target.pad
        # BOS + y and y + EOS are one token shorter than the stored BOS + y + EOS
        lengths = np.stack([source.lengths, target.lengths - 1])
        self.lengths = lengths.max(0)
        # among pairs of one longer side, the sum sorts by the shorter one
        self.tie_breakers = lengths.sum(0)
        self.fingerprint = f"{source.facts.sha256[:12]}-{target.facts.sha256[:12]}"

    def make_batch(self, indices: IntArray) -> Seq2SeqBatch:
        source, source_segments = gather_padded(self._source, indices, pad=self._source_pad)
        target, target_segments = gather_padded(self._target, indices, pad=self._target_pad, skip_last=1)
        targets, _ = gather_padded(self._target, indices, pad=IGNORE_INDEX, skip_first=1)
        return Seq2SeqBatch(source, target, targets, source_segments=source_segments, target_segments=target_segments)


class TokenRows(SequenceDataset):
    """Rows of tokens, framed and cut in their shard, with what other shards hold for each row or each of its tokens."""

    def __init__(self, tokens: TokenShard, *columns: TokenShard, pad: int) -> None:
        # document i of every shard belongs to row i
        assert {shard.facts.documents for shard in columns} == {tokens.facts.documents}
        self._tokens = tokens
        self._columns = columns
        self._pad = pad
        self.lengths = self.tie_breakers = tokens.lengths
        self.fingerprint = "-".join(shard.facts.sha256[:12] for shard in (tokens, *columns))

    def rows(self, indices: IntArray, *fills: int) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """The padded tokens, their segment ids, and what the other shards hold, each padded with its own number."""
        tokens, segments = gather_padded(self._tokens, indices, pad=self._pad)
        padded_columns = zip(self._columns, fills, strict=True)
        return tokens, segments, [gather_padded(shard, indices, pad=fill)[0] for shard, fill in padded_columns]


@final
class LabelledDataset(TokenRows):
    """Texts with a class each."""

    def make_batch(self, indices: IntArray) -> ClassificationBatch:
        tokens, segments = gather_padded(self._tokens, indices, pad=self._pad)
        # a class is a document of one token, so its index is that of the row
        labels = self._columns[0].tokens[indices].astype(np.int64)
        return ClassificationBatch(tokens, torch.from_numpy(labels), segments)


@final
class TaggedDataset(TokenRows):
    """Sentences with the class of each word at its first token and three tree columns for each token.

    In the shards classes and tree columns are one higher, so that 0 means none.
    """

    def make_batch(self, indices: IntArray) -> TaggingBatch:
        tokens, segments, (classes, trees) = self.rows(indices, 0, 0)
        # shards hold no negative numbers, so 0 stands for no class and is also what padding is filled with
        targets = torch.where(classes == 0, IGNORE_INDEX, classes - 1)
        return TaggingBatch(tokens, targets, segments, trees.view(*tokens.shape, 3) - 1)


@final
class SentencePairDataset(TokenRows):
    """Pairs of sentences with the part of each token, and a class each."""

    def make_batch(self, indices: IntArray) -> ClassificationBatch:
        tokens, segments, (parts, labels) = self.rows(indices, PADDING_SEGMENT, 0)
        return ClassificationBatch(tokens, labels[:, 0], segments, parts=parts)


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
        return AnswerSpanBatch(tokens, ends, segments, roles=roles, parts=parts)


@final
class EncodedTexts:
    """The token ids of texts and their tokenizer; `lengths` are without start and end token."""

    def __init__(self, texts: Sequence[str], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        ids = tokenizer.encode_many(texts)
        self.lengths = np.array([len(tokens) for tokens in ids], dtype=np.int64)
        # the empty array keeps the type where there are no texts
        self._flat = np.concatenate([np.zeros(0, dtype=np.int32), *ids])
        self._starts = self.lengths.cumsum() - self.lengths

    def rows(self, texts: IntArray) -> tuple[IntArray, IntArray]:
        """The tokens of texts, padded on the right, and their lengths; text -1 is empty."""
        exists = texts >= 0
        # text -1, which a row without a text has, becomes an empty range
        starts = self._starts[texts] * exists
        lengths = self.lengths[texts] * exists
        width = int(lengths.max(initial=0))
        return pad_ragged(self._flat, starts, lengths, width=width, fill=self.tokenizer.pad), lengths

    def targets(self, texts: IntArray) -> tuple[Tensor, Tensor, Tensor | None]:
        """BOS + y and y + EOS for the tokens y of each text, as `target` and `targets` of a pair, and segment ids.

        The segment ids (0, and -1 at padding) are None if no text is padded."""
        tokens, lengths = self.rows(texts)
        # one column more on both sides: for BOS in front, and for EOS behind the longest text
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
    # no segment ids without padding: attention then takes the path without a mask
    if int(lengths.min()) == width:
        return tokens, None
    is_padding = np.arange(width) >= lengths[:, None]
    return tokens, torch.from_numpy(-is_padding.astype(np.int64))
