"""heads and prune: what each head attends to, as tables, JSON and pictures, and heads removed from a trained run."""

import json
from pathlib import Path

import pytest
from commands import Cli, lines, sentences

import manyformer as mf
from manyformer.analysis.heads import read_head_labels
from manyformer.base.errors import UserError

PARTS = ["encoder.0.attention", "decoder.0.attention", "decoder.0.cross"]


def test_each_kind_of_attention_of_a_translation_has_a_table(cli: Cli, pairs_run: Path, tmp_path: Path) -> None:
    picture = tmp_path / "heads.png"
    ended = cli("heads", str(pairs_run), "--sentences", "5", "--out", str(picture))
    assert ended.code == 0, ended.err
    titles = [line for line in lines(ended.out) if line.startswith("confidence")]
    assert titles == ["confidence: encoder attention", "confidence: decoder attention", "confidence: decoder cross"]
    assert [part for part in PARTS if part in ended.out] == PARTS
    assert picture.stat().st_size > 1000


def test_heads_are_json_and_their_labels_stay_with_the_run(cli: Cli, pairs_run: Path, tmp_path: Path) -> None:
    trees = tmp_path / "trees.conllu"
    trees.write_text(sentences(120))
    assert read_head_labels(pairs_run) is None
    ended = cli("heads", str(pairs_run), "--sentences", "110", "--trees", str(trees), "--json", "--save")
    assert ended.code == 0, ended.err
    actual = json.loads(ended.out)
    assert actual["trees"] == 110
    assert 0 < actual["sentences"] <= 110
    assert [(one["part"], one["head"]) for one in actual["heads"]] == [
        (part, head) for part in PARTS for head in (0, 1)
    ]
    for one in actual["heads"]:
        assert 0 < one["confidence"] <= 1
        assert 0 <= one["offset"]["share"] <= 1
        assert one["rare"]["chance"] <= one["rare"]["chance_of_two"] <= 1
        # trees are over the source
        assert {score["edges"] for score in one["syntax"]} == ({110} if one["part"] == PARTS[0] else set())
    labels = read_head_labels(pairs_run)
    assert labels is not None
    assert list(labels) == PARTS
    assert [label for part in PARTS for label in labels[part]] == [", ".join(one["labels"]) for one in actual["heads"]]
    (pairs_run / "heads.json").write_text('{"format": 1, "labels": {"x": []}}')
    with pytest.raises(UserError, match="damaged"):
        read_head_labels(pairs_run)
    (pairs_run / "heads.json").unlink()


def test_a_language_model_reads_pieces_of_its_text(cli: Cli, text_run: Path) -> None:
    actual = json.loads(cli("heads", str(text_run), "--sentences", "3", "--json").out)
    assert actual["sentences"] == 3
    # no head of a causal model attends to the next token
    assert all(one["offset"]["offset"] <= 0 for one in actual["heads"])


def test_heads_refuses_what_it_cannot_read(cli: Cli, text_run: Path, trees_run: Path, tmp_path: Path) -> None:
    assert "tagging reads no plain text" in cli("heads", str(trees_run)).err
    assert "must end in one of .png" in cli("heads", str(text_run), "--out", "heads.txt").err
    ended = cli("heads", str(text_run), "--sentences", "2", "--trees", str(tmp_path / "none.conllu"))
    assert ended.code == 2
    assert "none.conllu" in ended.err


def test_the_loss_depends_on_heads(cli: Cli, pairs_run: Path, labels_run: Path, tmp_path: Path) -> None:
    options = ("--sentences", "4", "--importance", "--ablate", "loss", "--relevance", "2")
    actual = json.loads(cli("heads", str(pairs_run), *options, "--json").out)
    assert list(actual["importance"]) == list(actual["change of loss without the head"])
    assert set(actual["importance"]) == set(PARTS)
    for part in PARTS:
        # importance has the norm 1 in each layer
        assert sum(value**2 for value in actual["importance"][part]) == pytest.approx(1)
        assert any(actual["change of loss without the head"][part])
        assert 0.5 <= max(actual["relevance"][part]) <= 1
    ended = cli("heads", str(labels_run), *options, "--out", str(tmp_path / "heads.svg"))
    assert ended.code == 0, ended.err
    assert "importance: body attention" in ended.out
    assert "change of loss without the head: body attention" in ended.out
    assert (
        "there is no score 'accurcy'; did you mean accuracy"
        in cli("heads", str(labels_run), "--sentences", "2", "--ablate", "accurcy").err
    )


def test_heads_of_a_model_without_plain_text_are_measured(cli: Cli, trees_run: Path) -> None:
    ended = cli("heads", str(trees_run), "--sentences", "4", "--importance")
    assert ended.code == 0, ended.err
    assert "tagging reads no plain text" in ended.err
    assert "importance" in ended.out
    assert "confidence" not in ended.out


@pytest.mark.parametrize("options", [("--how", "importance"), ("--how", "gates", "--steps", "2")])
def test_prune_prints_the_scores_and_writes_a_run(
    cli: Cli, text_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    # training reads the data, whose path is relative
    monkeypatch.chdir(text_run.parent.parent)
    out = tmp_path / "one-head"
    ended = cli("prune", str(text_run), "--keep", "1", *options, "--out", str(out), "--json")
    assert ended.code == 0, ended.err
    record = json.loads(ended.out)
    assert [point["heads"] for point in record["points"]] == [2, 1]
    assert record["how"] == options[1]
    assert mf.load(out).spec.keywords["removed_heads"] == record["points"][-1]["removed"]
    assert cli("generate", str(out), "the cat", "--greedy", "--max-new", "5").out.startswith("the cat")
    again = cli("prune", str(text_run), "--keep", "1", *options, "--out", str(out))
    assert again.code == 2
    assert "exists already" in again.err


def test_prune_prints_a_table(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    ended = cli("prune", str(text_run), "--keep", "0", "--how", "importance", "--out", str(tmp_path / "none"))
    assert ended.code == 0, ended.err
    assert "bits per byte" in ended.out
    assert "removed body.0.attention:0,1" in ended.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep", "2", "--how", "importance"), "2 heads cannot be kept of 2: the number must be from 0 to 1"),
        (("--keep", "1", "--how", "importance", "--steps", "3"), "--steps (3) is for --how gates"),
        (("--keep", "1", "--how", "gates", "--penalty", "0"), "--penalty (0.0) must be above 0"),
        (
            ("--keep", "1", "--how", "importance", "--part", "encoder"),
            "there is no part 'encoder' with attention heads",
        ),
    ],
)
def test_prune_refuses(cli: Cli, text_run: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    ended = cli("prune", str(text_run), *words, "--out", str(tmp_path / "x"))
    assert ended.code == 2
    assert message in ended.err
    assert not (tmp_path / "x").exists()


def test_heads_of_another_text_than_the_run_held_out(cli: Cli, text_run: Path, here: Path) -> None:
    (here / "other.txt").write_text("the dog ran up the tree\n" * 9)
    own = json.loads(cli("heads", str(text_run), "--sentences", "8", "--json").out)
    other = json.loads(cli("heads", str(text_run), "--sentences", "8", "--data", "other.txt", "--json").out)
    assert own["heads"] != other["heads"]
    refused = cli("heads", str(text_run), "--data", "other.txt", "--importance")
    assert refused.code == 2
    assert "read held-out data" in refused.err
