"""Overlap of two tokenized texts: which documents of one are in the other, whole or in long passages."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.type_aliases import IntArray
from manyformer.data.batching.row_layouts import ragged_arange
from manyformer.data.storage.token_shards import TokenArray, TokenShard
from manyformer.data.tokenizers.tokenizer import Tokenizer

PASSAGE_CHARACTERS = 200
"""The length of the passages that are looked up; what two documents share beside them is not noticed."""

OVERLAP_CHARACTERS = 2000
"""Documents that share passages of this length in total overlap, even if it is a small part of both: more than a
license or a heading that many documents have."""

_WINDOWS_PER_CHUNK = 1 << 20
# odd, so that its powers are invertible modulo 2^64
_BASE = 0x9E3779B97F4A7C15
_HASH_SEED = 64

HashArray = NDArray[np.uint64]


class TextOverlap(NamedTuple):
    """Pair i: document `documents[i]` of a text overlaps with `reference_documents[i]` of another; sorted.

    `shared_fraction` is the fraction of the text's tokens in passages that occur anywhere in the other text.
    """

    documents: IntArray
    reference_documents: IntArray
    shared_fraction: float

    @property
    def overlapping(self) -> IntArray:
        """The documents of the text that overlap with any document of the other."""
        return np.unique(self.documents)


class _Passages(NamedTuple):
    """Passages of a text: their starts, documents, and the tokens that each adds to the earlier ones."""

    starts: IntArray
    documents: IntArray
    sizes: IntArray


def find_overlap(text: TokenShard, reference: TokenShard, tokenizer: Tokenizer) -> TextOverlap:
    """The documents of `text` that overlap with a document of `reference`, both in tokens of this tokenizer.

    Two documents overlap if they share passages of `OVERLAP_CHARACTERS` together, or half of either; documents shorter
    than a passage if they are equal. A shared stretch of twice the length of a passage is always noticed.
    """
    characters = text.facts.characters or text.facts.tokens
    # lengths in characters mean the same for every tokenizer
    tokens_per_character = text.facts.tokens / max(1, characters)
    length = max(2, round(PASSAGE_CHARACTERS * tokens_per_character))
    starts, sizes = _contents(text, tokenizer)
    _, reference_sizes = _contents(reference, tokenizer)
    # passages of one text end to end, and all windows of the other: a shared stretch may begin anywhere
    passages = _cut_passages(starts, sizes, length)
    hashes, number = np.unique(_hash_passages(text.tokens, passages.starts, length), return_inverse=True)
    occurring, occurrence_documents = _look_up(hashes, reference, length)
    # each passage with each document of the reference that it occurs in
    first = np.searchsorted(occurring, number)
    counts = np.searchsorted(occurring, number, side="right") - first
    matches = np.repeat(first, counts) + ragged_arange(counts)
    pairs = np.stack([np.repeat(passages.documents, counts), occurrence_documents[matches]])
    pairs, pair_number = np.unique(pairs, axis=1, return_inverse=True)
    shared = np.bincount(pair_number.ravel(), np.repeat(passages.sizes, counts), minlength=pairs.shape[1])
    # a short document overlaps if half of it is in the other one
    half = np.minimum(sizes[pairs[0]], reference_sizes[pairs[1]]) / 2
    pairs = pairs[:, shared >= np.minimum(OVERLAP_CHARACTERS * tokens_per_character, half)]
    # shorter than a passage, they have no window to look up
    short_pairs = _equal_short_documents(text, reference, length, tokenizer)
    documents, reference_documents = np.unique(np.concatenate([pairs, short_pairs], axis=1), axis=1)
    shared_tokens = passages.sizes[counts > 0].sum() + sizes[np.unique(short_pairs[0])].sum()
    return TextOverlap(documents, reference_documents, float(shared_tokens / max(1, sizes.sum())))


def _contents(shard: TokenShard, tokenizer: Tokenizer) -> tuple[IntArray, IntArray]:
    """The start and the size of each document, without its start and end tokens."""
    starts = np.asarray(shard.offsets[:-1])
    stops = np.asarray(shard.offsets[1:])
    filled = stops > starts
    has_bos = np.zeros_like(filled)
    has_eos = np.zeros_like(filled)
    has_bos[filled] = shard.tokens[starts[filled]] == tokenizer.bos
    has_eos[filled] = shard.tokens[stops[filled] - 1] == tokenizer.eos
    return starts + has_bos, np.maximum(stops - starts - has_bos - has_eos, 0)


def _cut_passages(starts: IntArray, sizes: IntArray, length: int) -> _Passages:
    """The passages of documents of at least `length` tokens: end to end, and a last one that ends the document."""
    counts = np.where(sizes >= length, -(-sizes // length), 0)
    documents = np.repeat(np.arange(len(sizes)), counts)
    index = ragged_arange(counts)
    offsets = np.minimum(index * length, sizes[documents] - length)
    return _Passages(starts[documents] + offsets, documents, np.minimum(length, sizes[documents] - index * length))


def _look_up(hashes: HashArray, reference: TokenShard, length: int) -> tuple[IntArray, IntArray]:
    """The occurrences of the sorted `hashes` in the reference: indices and documents, sorted."""
    offsets = np.asarray(reference.offsets)
    occurrences = [np.zeros((2, 0), np.int64)]
    for start in range(0, max(0, len(reference.tokens) - length + 1) if len(hashes) else 0, _WINDOWS_PER_CHUNK):
        window_hashes = _hash_windows(reference.tokens[start : start + _WINDOWS_PER_CHUNK + length - 1], length)
        # the last index for hashes beyond all of the text's
        index = np.searchsorted(hashes, window_hashes).clip(max=len(hashes) - 1)
        positions = np.flatnonzero(hashes[index] == window_hashes)
        documents = np.searchsorted(offsets, start + positions, side="right") - 1
        occurrences.append(np.unique(np.stack([index[positions], documents]), axis=1))
    occurring, documents = np.unique(np.concatenate(occurrences, axis=1), axis=1)
    return occurring, documents


def _hash_windows(tokens: TokenArray, length: int) -> HashArray:
    """A polynomial hash modulo 2^64 of every window of `length` tokens."""
    values = _token_values(tokens)
    powers = _powers(_BASE, len(tokens))
    # differences of prefix sums give every window in one pass, whatever its length
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(values * powers, dtype=np.uint64)])
    inverse = _powers(pow(_BASE, -1, 1 << 64), len(tokens) - length + 1)
    windows: HashArray = (sums[length:] - sums[:-length]) * inverse
    return windows


def _hash_passages(tokens: TokenArray, starts: IntArray, length: int) -> HashArray:
    """The hash of the window at each start."""
    rows_per_chunk = max(1, _WINDOWS_PER_CHUNK // length)
    hashes = np.zeros(len(starts), np.uint64)
    for row in range(0, len(starts), rows_per_chunk):
        chunk = starts[row : row + rows_per_chunk]
        values = _token_values(tokens[chunk[:, None] + np.arange(length)])
        hashes[row : row + rows_per_chunk] = (values * _powers(_BASE, length)).sum(1, dtype=np.uint64)
    return hashes


def _token_values(tokens: TokenArray) -> HashArray:
    """Token ids as well-mixed numbers (the finalizer of splitmix64)."""
    values = (np.asarray(tokens).astype(np.uint64) + np.uint64(_HASH_SEED)) * np.uint64(_BASE)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _powers(base: int, count: int) -> HashArray:
    """The powers of `base` from 0 on, modulo 2^64."""
    factors = np.full(count, base, np.uint64)
    # the power of 0
    factors[:1] = 1
    return np.cumprod(factors, dtype=np.uint64)


def _equal_short_documents(text: TokenShard, reference: TokenShard, length: int, tokenizer: Tokenizer) -> IntArray:
    """The pairs (2, n) of equal documents with at least one and fewer than `length` tokens."""
    by_content: dict[bytes, list[int]] = {}
    for document, content in _short_documents(reference, length, tokenizer):
        by_content.setdefault(content, []).append(document)
    pairs = [
        (document, equal)
        for document, content in _short_documents(text, length, tokenizer)
        for equal in by_content.get(content, ())
    ]
    return np.array(pairs, np.int64).reshape(-1, 2).T


def _short_documents(shard: TokenShard, length: int, tokenizer: Tokenizer) -> list[tuple[int, bytes]]:
    starts, sizes = _contents(shard, tokenizer)
    return [
        (document, shard.tokens[starts[document] : starts[document] + sizes[document]].astype("<u4").tobytes())
        for document in np.flatnonzero((sizes > 0) & (sizes < length)).tolist()
    ]
