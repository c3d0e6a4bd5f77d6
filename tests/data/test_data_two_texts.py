"""Tables of sentence pairs and of questions: what a batch holds, what is cut, and what is refused in which words."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import QuestionsData, SentencePairsData, TextData
from manyformer.data import OpenedData, open_data
from manyformer.inference.evaluate import evaluate, predict
from manyformer.nn.batches import IGNORE_INDEX, AnswerSpanBatch, ClassificationBatch, MaskedLMBatch

SIZES = [
    *("dim=8", "depth=1", "heads=2", "batch.tokens=128", "limits.steps=2", "schedule.warmup=0"),
    *("evaluate.every=2", "save.every=2", "device=cpu"),
]
QUESTIONS = [
    {"document": "Ann lives in Rome. Bob likes Oslo.", "question": "Where is Ann?", "answer": "Rome", "start": 13},
    {"document": "Rome is far. Rome is old.", "question": "What is old?", "answer": "Rome", "start": 13},
    {"document": "Nothing here.", "question": "Who?", "answer": "", "start": 0},
]


def questions(folder: Path, rows: list[dict[str, Any]], **more: Any) -> OpenedData:
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    given = {"path": str(path), "valid": str(path), "tokenizer": "char", **more}
    return open_data(QuestionsData(**given), "spans", batch_tokens=50, cache=folder / "cache", seed=0)


def answers(data: OpenedData) -> dict[str, str]:
    texts = {}
    for batch in data.valid:
        assert isinstance(batch, AnswerSpanBatch)
        assert batch.parts is not None
        for tokens, (first, last), parts in zip(batch.tokens, batch.targets, batch.parts):
            question = data.source.decode([int(token) for token in tokens[parts == 0][1:-1]])
            texts[question] = data.source.decode(tokens[first : last + 1].tolist()) if last else ""
    return texts


def test_the_span_of_an_answer_is_its_text(tmp_path: Path) -> None:
    data = questions(tmp_path, QUESTIONS)
    expected = {"Where is Ann?": "Rome", "What is old?": "Rome", "Who?": ""}
    assert answers(data) == expected
    assert data.required_keywords == {"vocab": data.vocab}
    # the second occurrence, at its place
    (tmp_path / "b").mkdir()
    placed = questions(tmp_path / "b", QUESTIONS, start="start")
    assert answers(placed) == expected
    starts = {int(first) for batch in placed.valid for first in batch.targets[:, 0]}  # type: ignore[union-attr]
    frame = len("What is old?") + 2
    assert frame + 13 in starts
    assert frame not in starts


def test_the_question_is_global_and_sentences_are_parts(tmp_path: Path) -> None:
    for setting in ("question", "none"):
        folder = tmp_path / setting
        folder.mkdir()
        for batch in questions(folder, QUESTIONS[:1], global_tokens=setting).valid:
            assert isinstance(batch, AnswerSpanBatch)
            assert batch.parts is not None
            assert batch.parts.unique().tolist() == [0, 1, 2]
            assert (batch.roles is None) is (setting == "none")
            if batch.roles is not None:
                assert batch.roles.tolist() == (batch.parts == 0).long().tolist()


def test_an_answer_beyond_the_end_of_a_row_is_none(tmp_path: Path) -> None:
    data = questions(tmp_path, QUESTIONS[:1], max_length=24)
    assert list(answers(data).values()) == [""]
    assert "cut at 24 tokens" in "\n".join(data.describe())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": "Lima"}, r"questions.jsonl:1: the answer 'Lima' does not occur in the document"),
        ({"start": 2}, r"questions.jsonl:1: after 2 characters of the document is 'n li', not 'Rome'"),
        ({"start": "x"}, r"questions.jsonl:1: the place of the answer must be a number of characters, not 'x'"),
    ],
)
def test_a_wrong_answer_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        questions(tmp_path, [QUESTIONS[0] | change], start="start" if "start" in change else None)


def pairs(folder: Path, text: str, **more: Any) -> OpenedData:
    path = folder / "pairs.tsv"
    path.write_text(text)
    given = {"path": str(path), "valid": str(path), "tokenizer": "char", **more}
    return open_data(SentencePairsData(**given), "labelled", batch_tokens=8, cache=folder / "cache", seed=0)


def test_a_pair_is_a_row_with_two_parts(tmp_path: Path) -> None:
    data = pairs(tmp_path, "ab\tcd\tyes\nab\tc\tno\n")
    assert data.labels == ("no", "yes")
    rows = {}
    for batch in data.valid:
        assert isinstance(batch, ClassificationBatch)
        assert batch.parts is not None
        for tokens, parts, label in zip(batch.tokens.tolist(), batch.parts.tolist(), batch.labels.tolist()):
            rows[data.labels[label]] = (data.source.decode(tokens), parts)
    assert rows == {"yes": ("abcd", [0, 0, 0, 0, 1, 1, 1]), "no": ("abc", [0, 0, 0, 0, 1, 1])}
    with pytest.raises(UserError, match="all training sentence pairs have the label 'yes'"):
        pairs(tmp_path, "ab\tcd\tyes\n")
    with pytest.raises(UserError, match=r"pairs.tsv:1: column 2 \(counted from 0\) is missing"):
        pairs(tmp_path, "ab\tcd\n")


def test_runs_are_scored_and_predict(tmp_path: Path) -> None:
    """Both tasks from their tables to answers, and the classifier begins with the layers of the reader."""
    table = tmp_path / "questions.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS * 4))
    reader = ["data.kind=questions", f"data.path={table}", f"data.valid={table}", "data.tokenizer=char"]
    mf.train("etc", [*SIZES, *reader, "data.max_length=96", f"out={tmp_path / 'reader'}"])
    scores = evaluate(tmp_path / "reader")
    assert [score.name for score in scores.scores] == ["exact match", "answer F1"]
    assert scores.how == "12 questions, 4 without an answer"
    predicted = list(predict(tmp_path / "reader", str(table), top=2))
    assert [item.input.name for item in predicted] == [row["question"] for row in QUESTIONS] * 4
    assert all(len(item.prediction[0]) == 2 for item in predicted)

    lines = tmp_path / "pairs.tsv"
    lines.write_text("Ann lives\tin Rome\tyes\nBob is\tfar\tno\n" * 8)
    classifier = ["data.kind=sentence-pairs", f"data.path={lines}", f"data.valid={lines}", "data.max_length=96"]
    earlier = [f"init_from={tmp_path / 'reader'}", f"data.tokenizer_of={tmp_path / 'reader'}"]
    mf.train("etc", [*SIZES, *classifier, *earlier, f"out={tmp_path / 'classifier'}"])
    assert evaluate(tmp_path / "classifier").how == "16 pairs"
    (tmp_path / "new.tsv").write_text("Ann\tRome\n")
    (item,) = predict(tmp_path / "classifier", str(tmp_path / "new.tsv"))
    assert item.prediction[0][0].label in ("yes", "no")


def test_sentences_are_the_parts_of_masked_text(tmp_path: Path) -> None:
    texts = ["Ann ran. Bob sat!", "No end here", "A. B? C"]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text * 3}) + "\n" for text in texts))
    section = TextData(path=str(path), valid=str(path), tokenizer="char", length=64, text_parts="sentences")
    data = open_data(section, "masked", batch_tokens=64, cache=tmp_path / "cache", seed=0)
    documents = 0
    for batch in data.valid:
        assert isinstance(batch, MaskedLMBatch)
        assert batch.parts is not None
        segments = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
        original = torch.where(batch.targets == IGNORE_INDEX, batch.tokens, batch.targets)
        for row, row_segments, parts in zip(original, segments, batch.parts):
            assert (parts[row_segments < 0] == -1).all()
            for document in row_segments.unique()[row_segments.unique() >= 0]:
                number, documents = 0, documents + 1
                for token, part in zip(row[row_segments == document], parts[row_segments == document]):
                    assert part == number
                    number += data.source.token(token) in (".", "!", "?")
    assert documents == 3


def test_parts_for_a_model_without_are_refused(tmp_path: Path) -> None:
    path, out = tmp_path / "text.txt", tmp_path / "run"
    path.write_text("Ann ran. Bob sat! " * 60)
    with pytest.raises(UserError, match="this model does not use the parts of tokens"):
        mf.train("bert", [*SIZES, "data.length=32", "data.text_parts=sentences", f"data.path={path}", f"out={out}"])
