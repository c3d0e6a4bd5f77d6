"""Statistics of the attention weights of each head, summed sentence by sentence in bounded memory.

`AttentionStatistics` says where a head attends: by distance, and to rare tokens. `SyntaxStatistics` says along which
edges of dependency trees, against the best fixed offset on the same sentences."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple, final

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray

MAX_OFFSET = 16
"""The largest distance between query and key that a positional head may prefer."""

MIN_OFFSET_SHARE = 0.5
"""An offset counts only where at least this share of the queries has a token at it: others are rare by chance."""

EdgeDirection = Literal["dependent to head", "head to dependent"]

DIRECTIONS: tuple[EdgeDirection, ...] = ("dependent to head", "head to dependent")

SYNTACTIC_MARGIN = 0.1
"""By how much a syntactic head exceeds the best fixed offset (Voita et al. 2019, section 5.3)."""

MIN_EDGES = 100
"""Relations with fewer edges are left out: among many relations and heads some exceed any offset by chance."""


class SentenceWeights(NamedTuple):
    """The attention weights of one part of a model between the ordinary tokens of one sentence.

    `queries` and `keys` are the columns of the tokens in their sequences, `key_counts` how often the key tokens occur
    in the training text (None if that is unknown), and `visible` the keys that a query may attend to."""

    weights: Float[NDArray[np.float32], "h l s"]
    queries: Int[NDArray[np.int64], " l"]
    keys: Int[NDArray[np.int64], " s"]
    visible: Bool[NDArray[np.bool_], "l s"]
    key_counts: Int[NDArray[np.int64], " s"] | None = None


class OffsetShare(NamedTuple):
    """The distance from query to key that a head attends to most, and in what share of the tokens that have it."""

    offset: int
    share: float


class RareTokenShares(NamedTuple):
    """The share of queries whose largest weight is at the least frequent visible token, or at one of the least two.

    `chance` and `chance_of_two` are these shares for a uniformly random visible key."""

    least: float
    least_two: float
    chance: float
    chance_of_two: float


@final
class AttentionStatistics:
    """Confidence, preferred offset and preference for rare tokens of the heads of one part (Voita et al. 2019, sec. 5).

    The confidence of a head is the mean over all tokens of the largest weight of a token. Queries whose weights are all
    zero count for the confidence and the spectrum alone. The spectrum is the share of the largest quarter of the
    singular values in their sum, the mean over sentences (Wang et al. 2020, Linformer, section 3.1)."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self.tokens = 0
        self.sentences = 0
        self._peaks = np.zeros(heads)
        self._spectra = np.zeros(heads)
        self._offset_hits = np.zeros((heads, 2 * MAX_OFFSET + 1), np.int64)
        self._offset_queries = np.zeros(2 * MAX_OFFSET + 1, np.int64)
        self._rare_hits = np.zeros((2, heads))
        self._rare_chances = np.zeros(2)
        self._rare_tokens = 0

    def add(self, sentence: SentenceWeights) -> None:
        """Add the weights of a sentence."""
        weights = sentence.weights
        if not weights.size:
            return
        peaks = weights.max(-1)
        attended = weights.argmax(-1)
        self.tokens += len(sentence.queries)
        self.sentences += 1
        # sums in float64: float32 loses single tokens after some millions
        self._peaks += peaks.sum(1, dtype=np.float64)
        self._spectra += _spectrum_shares(weights)
        self._add_offsets(sentence.keys[attended] - sentence.queries, peaks > 0)
        differences = sentence.keys[None] - sentence.queries[:, None]
        # counted over all pairs, because at the ends of a sentence an offset has no token
        in_reach = np.abs(differences) <= MAX_OFFSET
        self._offset_queries += np.bincount(differences[in_reach] + MAX_OFFSET, minlength=2 * MAX_OFFSET + 1)
        if sentence.key_counts is not None:
            self._add_rare(attended, peaks > 0, sentence.visible, sentence.key_counts)

    def _add_offsets(self, offsets: NDArray[np.int64], attends: NDArray[np.bool_]) -> None:
        counted = attends & (np.abs(offsets) <= MAX_OFFSET)
        head_numbers = np.broadcast_to(np.arange(self.heads)[:, None], offsets.shape)[counted]
        # `add.at`, because += on an index adds a repeated pair of head and offset only once
        np.add.at(self._offset_hits, (head_numbers, offsets[counted] + MAX_OFFSET), 1)

    def _add_rare(
        self,
        attended: NDArray[np.int64],
        attends: NDArray[np.bool_],
        visible: NDArray[np.bool_],
        key_counts: NDArray[np.int64],
    ) -> None:
        """Ties between equally frequent tokens all count, for the heads as for chance."""
        # invisible tokens sort to the end
        visible_counts = np.where(visible, key_counts[None].astype(np.float64), np.inf)
        ascending = np.sort(visible_counts, axis=1)
        has_key = np.isfinite(ascending[:, 0])
        self._rare_tokens += int(has_key.sum())
        for rank in range(2):
            # the least frequent token again where a query sees a single one
            limits = ascending[:, min(rank, ascending.shape[1] - 1)]
            limits = np.where(np.isfinite(limits), limits, ascending[:, 0])
            is_rare = (visible_counts <= limits[:, None]) & visible
            hits = is_rare[np.arange(len(is_rare)), attended] & attends & has_key
            self._rare_hits[rank] += hits.sum(1)
            shares = is_rare.sum(1) / np.maximum(visible.sum(1), 1)
            self._rare_chances[rank] += shares[has_key].sum()

    def confidences(self) -> list[float]:
        """The confidence of each head."""
        means: list[float] = (self._peaks / max(self.tokens, 1)).tolist()
        return means

    def spectra(self) -> list[float]:
        """The share of the largest quarter of the singular values of each head."""
        means: list[float] = (self._spectra / max(self.sentences, 1)).tolist()
        return means

    def offsets(self) -> list[OffsetShare | None]:
        """The preferred offset of each head; None if no offset is possible for enough queries."""
        possible = self._offset_queries >= max(1, MIN_OFFSET_SHARE * self.tokens)
        if not possible.any():
            return [None] * self.heads
        shares = np.where(possible, self._offset_hits / np.maximum(self._offset_queries, 1), -1.0)
        best = shares.argmax(1)
        return [OffsetShare(int(index) - MAX_OFFSET, float(row[index])) for row, index in zip(shares, best)]

    def rare_shares(self) -> list[RareTokenShares | None]:
        """How often each head attends to rare tokens; None if their frequencies are unknown."""
        if not self._rare_tokens:
            return [None] * self.heads
        least, least_two = self._rare_hits / self._rare_tokens
        chance, chance_of_two = self._rare_chances / self._rare_tokens
        return [
            RareTokenShares(float(least[head]), float(least_two[head]), float(chance), float(chance_of_two))
            for head in range(self.heads)
        ]


def _spectrum_shares(weights: Float[NDArray[np.float32], "h l s"]) -> Float[NDArray[np.float64], " h"]:
    """The sum of the largest quarter of the singular values of each head's weights, by that of all; 0 for no weights.

    A quarter is 128 of 512 tokens, as in figure 1 of the paper."""
    values = np.linalg.svd(weights.astype(np.float64), compute_uv=False)
    # rounded up, so that a sentence of fewer than four tokens has a quarter too
    largest = values[:, : -(-values.shape[1] // 4)].sum(1)
    shares: NDArray[np.float64] = largest / np.maximum(values.sum(1), np.finfo(np.float64).tiny)
    return shares


class SyntacticScore(NamedTuple):
    """How often the word with a head's largest weight is the other end of an edge, and how often the best offset is."""

    relation: str
    direction: EdgeDirection
    accuracy: float
    baseline: float
    offset: int
    edges: int

    @property
    def is_syntactic(self) -> bool:
        """Whether the head exceeds the best offset by `SYNTACTIC_MARGIN`."""
        return self.accuracy >= self.baseline + SYNTACTIC_MARGIN


class WordTree(NamedTuple):
    """A dependency tree over the words of a sentence: the first token of each word, relations, and 1-based heads.

    Tokens of a word end where the next word begins; a head of 0 is the root's."""

    first_tokens: Sequence[int]
    relations: Sequence[str]
    heads: Sequence[int]


def word_weights(
    weights: Float[NDArray[np.float32], "h l l"], first_tokens: Sequence[int]
) -> Float[NDArray[np.float32], "h n n"]:
    """The weights between words (n): the mean over the queries of a word, the sum over the keys of a word.

    Every word needs a token, and the first word begins at token 0."""
    lengths = np.diff([*first_tokens, weights.shape[1]]).astype(np.float32)
    # attention to a word is attention to any of its tokens; a word attends as its tokens do on average
    columns = np.add.reduceat(weights, first_tokens, axis=2)
    sums: NDArray[np.float32] = np.add.reduceat(columns, first_tokens, axis=1)
    return np.divide(sums, lengths[:, None], dtype=np.float32)


@final
class SyntaxStatistics:
    """For each relation and direction, how often each head of one part attends from one word of an edge to the other.

    Voita et al. (2019), section 5.3; in both directions, for every relation."""

    def __init__(self, heads: int) -> None:
        self.heads = heads
        self._hits: dict[tuple[str, EdgeDirection], NDArray[np.int64]] = {}
        self._offsets: dict[tuple[str, EdgeDirection], Counter[int]] = defaultdict(Counter)

    def add(self, weights: Float[NDArray[np.float32], "h l l"], tree: WordTree) -> None:
        """Add the weights of a sentence between all of its ordinary tokens."""
        # a word without tokens (some tokenizers drop characters) has neither queries nor keys
        ends = [*tree.first_tokens[1:], weights.shape[1]]
        tokenized = [index for index, (start, end) in enumerate(zip(tree.first_tokens, ends)) if end > start]
        places = {word: place for place, word in enumerate(tokenized)}
        attended = word_weights(weights, [tree.first_tokens[word] for word in tokenized]).argmax(-1)
        for dependent, (relation, head) in enumerate(zip(tree.relations, tree.heads)):
            if head == 0 or dependent not in places or head - 1 not in places:
                continue
            # heads count from 1, because 0 stands for the root
            edge = (places[dependent], places[head - 1])
            for direction, (word, other_word) in zip(DIRECTIONS, (edge, edge[::-1])):
                hits = self._hits.setdefault((relation, direction), np.zeros(self.heads, np.int64))
                hits += attended[:, word] == other_word
                self._offsets[relation, direction][other_word - word] += 1

    def scores(self, *, min_edges: int = MIN_EDGES) -> list[list[SyntacticScore]]:
        """The scores of each head, the largest margin over the baseline first."""
        by_head: list[list[SyntacticScore]] = [[] for _ in range(self.heads)]
        for (relation, direction), hits in self._hits.items():
            offsets = self._offsets[relation, direction]
            # every edge was counted at one offset, so that the total is the number of edges
            if (edges := offsets.total()) < min_edges:
                continue
            # of equally frequent offsets the nearest one, and then the right one: the result is the same on every
            # machine
            offset, count = max(offsets.items(), key=lambda item: (item[1], -abs(item[0]), item[0]))
            for scores, hit_count in zip(by_head, hits.tolist(), strict=True):
                score = SyntacticScore(relation, direction, hit_count / edges, count / edges, offset, edges)
                scores.append(score)
        return [sorted(scores, key=lambda score: score.baseline - score.accuracy) for scores in by_head]
