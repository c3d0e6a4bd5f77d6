"""prune: heads removed from a trained run by one command."""

import json
from pathlib import Path

import pytest
from commands import Cli

import manyformer as mf


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
