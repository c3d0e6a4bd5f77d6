"""Two texts in a row: the frame, the parts, what is cut, and the best spans, against plain loops."""

import math

import pytest
import torch

from manyformer.data.tokenizers.native_tokenizers import CharTokenizer
from manyformer.models.scores import answer_exact_match, answer_f1
from manyformer.models.tasks.answer_spans import MAX_ANSWER_TOKENS, NO_ANSWER, best_answers
from manyformer.nn.batches.two_texts import (
    DocumentEncoder,
    first_text_roles,
    frame_pair,
    frame_question,
    pad_texts,
    sentence_starts,
    tokens_of_answer,
)
from manyformer.nn.core import GLOBAL_ROLE

TOKENIZER = CharTokenizer.learn(["abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .!?-\n"], None)
BOS, EOS = TOKENIZER.bos, TOKENIZER.eos
DOCUMENT = "Ann lives in Rome. Bob moved! He\n\nlikes Oslo"


def test_a_pair_shares_a_row() -> None:
    framed = frame_pair([10, 11], [12], TOKENIZER, 99)
    assert framed.tokens == [BOS, 10, 11, EOS, 12, EOS]
    assert framed.parts == [0, 0, 0, 0, 1, 1]
    assert (framed.start, framed.uncut_length) == (4, 6)


@pytest.mark.parametrize(("first", "second"), [(7, 2), (2, 7), (5, 5), (0, 9)])
def test_the_longer_sentence_of_a_pair_is_cut(first: int, second: int) -> None:
    framed = frame_pair(range(10, 10 + first), range(30, 30 + second), TOKENIZER, 10)
    lengths = [first, second]
    while sum(lengths) > 7:
        lengths[lengths[0] <= lengths[1]] -= 1
    assert framed.tokens == [BOS, *range(10, 10 + lengths[0]), EOS, *range(30, 30 + lengths[1]), EOS]
    assert framed.uncut_length == first + second + 3


def test_sentences_end_at_their_marks_and_at_empty_lines() -> None:
    starts = sentence_starts(DOCUMENT)
    sentences = [DOCUMENT[start:stop] for start, stop in zip(starts, [*starts[1:], len(DOCUMENT)])]
    assert sentences == ["Ann lives in Rome.", " Bob moved!", " He", "\n\nlikes Oslo"]
    assert sentence_starts("") == sentence_starts("3.50 is no end") == [0]


@pytest.mark.parametrize("answer", ["Rome", "Bob moved", "n lives i", "Oslo"])
def test_the_tokens_of_an_answer_are_its_characters(answer: str) -> None:
    start = DOCUMENT.index(answer)
    touched = tokens_of_answer(DocumentEncoder(TOKENIZER)(DOCUMENT), start, start + len(answer))
    assert touched == (start, start + len(answer) - 1)


def test_a_question_precedes_its_document() -> None:
    encode = DocumentEncoder(TOKENIZER)
    framed = frame_question("Where", DOCUMENT, encode, 999)
    assert TOKENIZER.decode(framed.tokens[1:6]) == "Where"
    assert TOKENIZER.decode(framed.tokens[framed.start : -1]) == DOCUMENT
    assert framed.parts == [0] * 7 + [1] * 18 + [2] * 11 + [3] * 3 + [4] * 12 + [4]
    assert framed.spans == [(index, index + 1) for index in range(len(DOCUMENT))]
    cut = frame_question("Where is it", DOCUMENT, encode, 16)
    assert len(cut.tokens) == len(cut.parts) == 16
    assert len(cut.spans) == 16 - cut.start - 1
    # the question has a quarter of a row
    assert cut.uncut_length == max(4 * len("Where is it"), len("Where is it") + len(DOCUMENT) + 3)
    assert TOKENIZER.decode(cut.tokens[1 : cut.start - 1]) == "Wher"


def test_rows_are_padded_and_the_question_is_global() -> None:
    tokens, segments, parts = pad_texts(
        [frame_pair([10], [11], TOKENIZER, 9), frame_pair([10], [11, 12], TOKENIZER, 9)], 0, torch.device("cpu")
    )
    assert tokens.tolist() == [[BOS, 10, EOS, 11, EOS, 0], [BOS, 10, EOS, 11, 12, EOS]]
    assert segments.tolist() == [[0, 0, 0, 0, 0, -1], [0] * 6]
    assert parts.tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, 1, 1, 1]]
    assert first_text_roles(parts).tolist() == [[GLOBAL_ROLE] * 3 + [0] * 3] * 2


def test_the_best_answers_are_those_of_all_spans() -> None:
    """Against a loop over all pairs of ends."""
    document = "abcdefghij" * 4
    framed = frame_question("Who", document, DocumentEncoder(TOKENIZER), 99)
    logits = torch.randn(len(framed.tokens), 2, generator=torch.Generator().manual_seed(3)) * 3
    scores = {NO_ANSWER: float(logits[0].sum())}
    total = math.exp(scores[NO_ANSWER])
    last_column = len(framed.tokens) - 1
    for first in range(framed.start, last_column):
        for last in range(first, min(first + MAX_ANSWER_TOKENS, last_column)):
            score = float(logits[first, 0] + logits[last, 1])
            text = TOKENIZER.decode(framed.tokens[first : last + 1])
            scores[text] = max(score, scores.get(text, -math.inf))
            total += math.exp(score)
    expected = sorted(scores.items(), key=lambda item: -item[1])[:3]
    answers = best_answers(logits, framed, document, 3)
    assert [answer.label for answer in answers] == [text for text, _ in expected]
    for answer, (_, score) in zip(answers, expected):
        assert answer.probability == pytest.approx(math.exp(score) / total, rel=1e-4)


def test_answers_are_compared_as_squad_does() -> None:
    """Rajpurkar et al. 2016, section 6.1: case, punctuation and articles do not count."""
    answers, references = ["The Rome!", "in Oslo", "", "Lima"], ["rome", "Oslo", "", ""]
    assert answer_exact_match(answers, references).value == 50.0
    assert answer_f1(answers, references).value == pytest.approx(100 * (1 + 2 / 3 + 1 + 0) / 4)
