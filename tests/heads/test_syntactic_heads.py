"""Weights between words, and heads that follow the edges of trees, equal their definitions."""

import numpy as np
import pytest

from manyformer.heads.syntactic_heads import DIRECTIONS, SyntaxStatistics, WordTree, word_weights

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
