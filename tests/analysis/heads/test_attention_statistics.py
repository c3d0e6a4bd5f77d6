"""The statistics of heads equal their definitions, written as loops over tokens, and single out planted heads.

The same holds of weights between words, and of heads that follow the edges of trees."""

import numpy as np
import pytest
from numpy.typing import NDArray

from manyformer.analysis.heads.attention_statistics import (
    DIRECTIONS,
    MAX_OFFSET,
    AttentionStatistics,
    SentenceWeights,
    SyntaxStatistics,
    WordTree,
    word_weights,
)

LENGTHS = (1, 2, 7, 12)
Sentence = tuple[NDArray[np.float32], NDArray[np.int64]]


def sentences(*, causal: bool, seed: int = 0) -> list[Sentence]:
    """Random weights of three heads and token counts with ties, for sentences of several lengths."""
    generator = np.random.default_rng(seed)
    drawn = []
    for length in LENGTHS:
        weights = generator.random((3, length, length)).astype(np.float32) ** 3
        if causal:
            weights = np.tril(weights)
        drawn.append((weights / weights.sum(-1, keepdims=True), generator.integers(0, 4, length)))
    return drawn


def read(drawn: list[Sentence], *, causal: bool, first_column: int = 1) -> AttentionStatistics:
    statistics = AttentionStatistics(len(drawn[0][0]))
    for weights, counts in drawn:
        length = len(counts)
        columns = np.arange(length) + first_column
        visible = np.tril(np.ones((length, length), bool)) if causal else np.ones((length, length), bool)
        statistics.add(SentenceWeights(weights, columns, columns, visible, counts))
    return statistics


def naive_offset_share(drawn: list[Sentence], head: int, offset: int) -> float:
    hits = possible = 0
    for weights, counts in drawn:
        for query in range(len(counts)):
            if 0 <= query + offset < len(counts):
                possible += 1
                hits += int(weights[head, query].argmax()) == query + offset
    return hits / possible


def test_the_spectrum_is_that_of_the_eigenvalues() -> None:
    """Singular values are the roots of the eigenvalues of W' W; a matrix of rank 1 has all in the first."""
    drawn = sentences(causal=False)
    for head, spectrum in enumerate(read(drawn, causal=False).spectra()):
        shares = []
        for weights, counts in drawn:
            gram = weights[head].astype(np.float64).T @ weights[head]
            values = np.sqrt(np.maximum(np.sort(np.linalg.eigvalsh(gram))[::-1], 0))
            shares.append(values[: -(-len(counts) // 4)].sum() / values.sum())
        assert spectrum == pytest.approx(np.mean(shares), abs=1e-5)
    one_key, own_key = np.full((1, 8, 8), 1 / 8, np.float32), np.eye(8, dtype=np.float32)[None]
    plain = np.zeros(8, np.int64)
    assert read([(one_key, plain)], causal=False).spectra() == pytest.approx([1.0])
    assert read([(own_key, plain)], causal=False).spectra() == pytest.approx([0.25])


@pytest.mark.parametrize("causal", [False, True])
def test_confidence_and_offsets_equal_their_definitions(causal: bool) -> None:
    drawn = sentences(causal=causal)
    statistics = read(drawn, causal=causal)
    tokens = sum(LENGTHS)
    for head, (confidence, offset) in enumerate(zip(statistics.confidences(), statistics.offsets())):
        peaks = [row.max() for weights, _ in drawn for row in weights[head]]
        assert confidence == pytest.approx(sum(map(float, peaks)) / tokens)
        candidates = {
            distance: naive_offset_share(drawn, head, distance)
            for distance in range(-11, 12)
            if sum(max(0, length - abs(distance)) for length in LENGTHS) >= tokens / 2
        }
        assert offset is not None
        assert offset.share == pytest.approx(max(candidates.values()))
        assert candidates[offset.offset] == max(candidates.values())


@pytest.mark.parametrize("causal", [False, True])
def test_rare_shares_equal_their_definition(causal: bool) -> None:
    drawn = sentences(causal=causal)
    for head, rare in enumerate(read(drawn, causal=causal).rare_shares()):
        hits, chances, rows = np.zeros(2), np.zeros(2), 0
        for weights, counts in drawn:
            for query in range(len(counts)):
                visible = range(query + 1) if causal else range(len(counts))
                ascending = sorted(counts[key] for key in visible)
                for rank in range(2):
                    limit = ascending[min(rank, len(ascending) - 1)]
                    hits[rank] += counts[int(weights[head, query].argmax())] <= limit
                    chances[rank] += sum(counts[key] <= limit for key in visible) / len(visible)
                rows += 1
        assert rare is not None
        assert rare == pytest.approx((*hits / rows, *chances / rows))


def test_a_head_at_an_offset_has_the_share_one_in_sentences_of_any_length() -> None:
    # the last token has no next one, and the first no previous one: their queries attend to themselves here
    planted = []
    for length in (2, 3, 5):
        next_token = np.eye(length, k=1, dtype=np.float32)
        next_token[-1, -1] = 1
        previous_token = np.eye(length, k=-1, dtype=np.float32)
        previous_token[0, 0] = 1
        planted.append((np.stack([next_token, previous_token]), np.zeros(length, np.int64)))
    assert read(planted, causal=False).offsets() == [(1, 1.0), (-1, 1.0)]


def test_distant_offsets_and_single_tokens_are_no_positions() -> None:
    # every sentence has one pair at this distance, which is no preference
    length = MAX_OFFSET + 1
    weights = np.zeros((1, length, length), np.float32)
    weights[0, :, -1] = 1
    [offset] = read([(weights, np.zeros(length, np.int64))], causal=False).offsets()
    assert offset is not None
    assert offset.share <= 1 / 9
    assert AttentionStatistics(2).offsets() == [None, None]
    assert AttentionStatistics(2).rare_shares() == [None, None]


def test_a_query_without_weights_prefers_nothing() -> None:
    weights = np.zeros((1, 2, 2), np.float32)
    statistics = read([(weights, np.array([0, 5]))], causal=False)
    [offset], [rare] = statistics.offsets(), statistics.rare_shares()
    assert offset is not None
    assert rare is not None
    assert offset.share == rare.least == rare.least_two == 0
    assert statistics.confidences() == [0.0]


SENTENCES = [
    # first tokens of the words, tokens in all, relations, heads
    ([0, 1, 3, 4], 6, ["det", "nsubj", "root", "obj"], [2, 3, 0, 3]),
    ([0, 2, 3], 4, ["nsubj", "root", "obj"], [2, 0, 2]),
    ([0, 1], 2, ["nsubj", "root"], [2, 0]),
]


def random_weights(tokens: int, seed: int) -> np.ndarray:
    weights = np.random.default_rng(seed).random((2, tokens, tokens)).astype(np.float32)
    return weights / weights.sum(-1, keepdims=True)


def naive_word_weights(weights: np.ndarray, first_tokens: list[int]) -> np.ndarray:
    """The mean over the queries of a word of the sum over the keys of a word, one pair of words at a time."""
    ends = [*first_tokens[1:], weights.shape[1]]
    between = np.zeros((len(weights), len(ends), len(ends)))
    for query_word, (query_start, query_end) in enumerate(zip(first_tokens, ends)):
        for key_word, (key_start, key_end) in enumerate(zip(first_tokens, ends)):
            block = weights[:, query_start:query_end, key_start:key_end]
            between[:, query_word, key_word] = block.sum(2).mean(1)
    return between


def test_words_take_the_mean_of_their_queries_and_the_sum_of_their_keys() -> None:
    for seed, (first_tokens, tokens, _, _) in enumerate(SENTENCES):
        weights = random_weights(tokens, seed)
        between = word_weights(weights, first_tokens)
        np.testing.assert_allclose(between, naive_word_weights(weights, first_tokens), rtol=1e-5)
        np.testing.assert_allclose(between.sum(-1), 1, rtol=1e-5)


def test_scores_equal_their_definition() -> None:
    statistics = SyntaxStatistics(2)
    drawn = []
    for seed, (first_tokens, tokens, relations, heads) in enumerate(SENTENCES):
        weights = random_weights(tokens, seed)
        statistics.add(weights, WordTree(first_tokens, relations, heads))
        drawn.append((naive_word_weights(weights, first_tokens).argmax(-1), relations, heads))
    for head, scores in enumerate(statistics.scores(min_edges=1)):
        assert len(scores) == 2 * 3
        for score in scores:
            hits, offsets = 0, []
            for attended, relations, heads in drawn:
                for word, (relation, parent) in enumerate(zip(relations, heads)):
                    if relation == score.relation:
                        start, end = (word, parent - 1) if score.direction == DIRECTIONS[0] else (parent - 1, word)
                        hits += attended[head, start] == end
                        offsets.append(end - start)
            assert score.edges == len(offsets)
            assert score.accuracy == pytest.approx(hits / len(offsets))
            assert score.baseline == pytest.approx(max(map(offsets.count, offsets)) / len(offsets))
            assert offsets.count(score.offset) == max(map(offsets.count, offsets))


def test_a_head_that_follows_a_relation_exceeds_the_best_offset() -> None:
    statistics = SyntaxStatistics(2)
    for distance in range(1, 6):
        weights = np.full((2, 6, 6), 0.1, np.float32)
        # head 0 attends from the first word to its head, wherever that is; head 1 always to the next word
        weights[0, 0, distance] = weights[1, 0, 1] = 1
        heads = [distance + 1, *[0 if word == distance else distance + 1 for word in range(1, 6)]]
        relations = ["nsubj", *["root" if head == 0 else "dep" for head in heads[1:]]]
        statistics.add(weights, WordTree(list(range(6)), relations, heads))
    following, adjacent = (
        next(score for score in scores if (score.relation, score.direction) == ("nsubj", "dependent to head"))
        for scores in statistics.scores(min_edges=1)
    )
    assert (following.accuracy, following.is_syntactic) == (1.0, True)
    assert following.baseline == adjacent.accuracy == adjacent.baseline == pytest.approx(0.2)
    assert not adjacent.is_syntactic
    # five edges are not evidence
    assert statistics.scores() == [[], []]


def test_words_without_tokens_have_no_edges() -> None:
    statistics = SyntaxStatistics(1)
    weights = random_weights(2, 0)[:1]
    statistics.add(weights, WordTree([0, 1, 1], ["nsubj", "det", "root"], [3, 3, 0]))
    assert {(score.relation, score.edges) for score in statistics.scores(min_edges=1)[0]} == {("nsubj", 1)}
