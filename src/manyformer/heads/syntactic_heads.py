"""Heads that attend along the edges of dependency trees, against the best fixed offset on the same sentences."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Literal, NamedTuple, final

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

EdgeDirection = Literal["dependent to head", "head to dependent"]
DIRECTIONS: tuple[EdgeDirection, ...] = ("dependent to head", "head to dependent")

SYNTACTIC_MARGIN = 0.1
"""By how much a syntactic head exceeds the best fixed offset (Voita et al. 2019, section 5.3)."""

MIN_EDGES = 100
"""Relations with fewer edges are left out: among many relations and heads some exceed any offset by chance."""


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
            if (edges := offsets.total()) < min_edges:
                continue
            offset, count = max(offsets.items(), key=lambda item: (item[1], -abs(item[0]), item[0]))
            for scores, hit_count in zip(by_head, hits.tolist(), strict=True):
                score = SyntacticScore(relation, direction, hit_count / edges, count / edges, offset, edges)
                scores.append(score)
        return [sorted(scores, key=lambda score: score.baseline - score.accuracy) for scores in by_head]
