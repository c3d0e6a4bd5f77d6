"""A masked diffusion from the command line: trained, continued, scored with the sign of a bound, and filling gaps."""

import json
from pathlib import Path

import pytest
from commands import TEXT, TINY, Cli, train

WORDS = ("data.path=text.txt", "data.tokenizer=char", "data.length=64", "dropout=0.1", *TINY)


@pytest.fixture(scope="module")
def diffusion_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion")
    (folder / "text.txt").write_text(TEXT)
    return train(folder, "mdlm", *WORDS)


def losses(run: Path) -> list[str]:
    """The losses of training and validation at each logged step."""
    header, *rows = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    return [",".join(row[header.index(name)] for name in ("step", "loss", "valid_loss")) for row in rows]


def test_a_run_that_was_continued_has_the_losses_of_one_that_was_not(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    left_out = ("limits.", "evaluate.", "save.")
    words = [word for word in WORDS if not word.startswith(left_out)]
    # a schedule that does not depend on the number of steps, which differs between the first part and the whole
    words += ["schedule.name=constant", "schedule.warmup=2", "evaluate.every=4", "save.every=4", "log.every=2"]
    whole = train(tmp_path, "bd3-lm", *words, "limits.steps=8", "out=runs/whole").parent / "whole"
    train(tmp_path, "bd3-lm", *words, "limits.steps=4", "out=runs/parts")
    parts = train(tmp_path, "bd3-lm", *words, "limits.steps=8", "out=runs/parts").parent / "parts"
    assert losses(parts) == losses(whole)
    assert len(losses(whole)) > 4


def test_gaps_are_filled_and_the_rest_stays(diffusion_run: Path, cli: Cli) -> None:
    run = str(diffusion_run)
    filled = cli("generate", run, "the ___ sat", "--gap", "_", "--sampler", "low-confidence", "--seed", "1")
    assert filled.code == 0
    text = filled.out.rstrip("\n")
    assert (text[:4], text[7:], len(text)) == ("the ", " sat", 11)
    again = cli("generate", run, "the ___ sat", "--gap", "_", "--sampler", "low-confidence", "--seed", "1")
    assert again.out == filled.out
    lines = cli("generate", run, "the ", "--max-new", "8", "--steps", "2", "--samples", "2", "--seed", "3", "--json")
    records = [json.loads(line) for line in lines.out.splitlines()]
    assert [record["seed"] for record in records] == [3, 4]
    assert all(record["text"].startswith("the ") for record in records)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--top-k", "3"), "--top-k is for a model of each next token: leave it out"),
        (("--no-cache",), "use_cache is for a model of blocks"),
        (("--gap", "_"), "prompt 0 has no gap '_'"),
        (("--class", "3"), "--class is for images: leave it out"),
    ],
)
def test_options_of_other_models_are_refused(
    diffusion_run: Path, cli: Cli, words: tuple[str, ...], message: str
) -> None:
    ended = cli("generate", str(diffusion_run), "the ", *words)
    assert ended.code != 0
    assert message in ended.err


def test_options_of_a_diffusion_are_refused_for_a_causal_model(text_run: Path, cli: Cli) -> None:
    ended = cli("generate", str(text_run), "the ", "--steps", "3")
    assert ended.code != 0
    assert "--steps is for a masked diffusion: leave it out" in ended.err


def test_scores_are_told_as_bounds(diffusion_run: Path, cli: Cli) -> None:
    ended = cli("evaluate", str(diffusion_run))
    assert ended.code == 0
    assert "perplexity <=" in ended.out
    assert "bits per byte <=" in ended.out
    card = (diffusion_run / "model" / "README.md").read_text()
    assert "| loss | at most " in card
    assert "| accuracy | at most " not in card
