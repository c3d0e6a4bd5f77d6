"""train: what it shows before, during and after; and plot."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import TINY, Cli, lines

import manyformer as mf
from manyformer.cli.options import split_arguments

PNG = b"\x89PNG\r\n\x1a\n"
WORDS = ("train", "transformer-lm", "data.path=text.txt", "data.tokenizer=char", "data.length=64", *TINY)


def test_the_name_is_distinguished_from_settings_wherever_it_stands(here: Path) -> None:
    assert split_arguments(["lm/stdlib", "depth=4"]) == ("lm/stdlib", ["depth=4"])
    assert split_arguments(["--model.depth", "4", "lm/stdlib", "--lr=1"]) == (
        "lm/stdlib",
        ["--model.depth", "4", "--lr=1"],
    )
    assert split_arguments(["a=b"]) == (None, ["a=b"])
    assert split_arguments(["a", "b"]) == ("a", ["b"])
    (here / "a=b").write_text("recipe: bert")
    assert split_arguments(["a=b"]) == ("a=b", [])


def test_training_ends_in_what_its_loss_means_a_picture_and_what_to_do_next(cli: Cli, here: Path) -> None:
    ended = cli(*WORDS)
    assert ended.code == 0, ended.err
    out = lines(ended.out)
    assert [line.split()[0] for line in out[:3]] == ["note", "data", "data"]
    assert any(line.startswith("step     30/30") for line in out)
    ending = out[next(number for number, line in enumerate(out) if line.startswith("means")) :]
    assert "without a model" in " ".join(ending)
    # another run than any that is shipped, so that nothing stands beside it
    subjects = [line.split(" ")[0] for line in ending if not line.startswith(" ")]
    assert subjects == ["means", "curves", "card", "next"]
    assert max(map(len, ending)) <= 80
    assert "runs/transformer-lm/model/README.md" in "".join(ending)
    assert out[-3].startswith("next     manyformer generate runs/transformer-lm")
    assert out[-1].split() == ["manyformer", "evaluate", "runs/transformer-lm"]
    assert (here / "runs/transformer-lm/curves.png").read_bytes().startswith(PNG)
    assert mf.load(here / "runs/transformer-lm").tokenizer.encode("cat")
    # the same command again finds the run done, and changed settings are refused by name
    assert cli(*WORDS).code == 0
    changed = cli(*WORDS, "optim.lr=0.5")
    assert changed.code == 2
    assert "optim.lr" in changed.err
    assert "--fresh" in changed.err or "fresh" in changed.err
    assert cli(*WORDS, "optim.lr=0.005", "--fresh", "--quiet").code == 0


def test_json_goes_to_stdout_alone(cli: Cli, here: Path) -> None:
    ended = cli(*WORDS, "--json")
    record = json.loads(ended.out)
    assert record["step"] == 30
    assert record["out"] == "runs/transformer-lm"
    assert record["scores"]["loss"] > 0
    assert "step     30/30" in ended.err


def test_quiet_shows_the_end_alone(cli: Cli, here: Path) -> None:
    out = lines(cli(*WORDS, "--quiet").out)
    assert [line.split()[0] for line in out] == ["done", "model"]


def test_a_dry_run_trains_nothing_and_is_a_run_file(cli: Cli, here: Path) -> None:
    ended = cli(*WORDS, "--dry-run", "seed=7")
    assert ended.code == 0, ended.err
    assert not (here / "runs").exists()
    (here / "again.yaml").write_text(ended.out)
    again = cli("train", "again.yaml", "--print-config")
    assert yaml.safe_load(again.out) == yaml.safe_load(ended.out)
    assert yaml.safe_load(again.out)["seed"] == 7
    assert "parameters" not in again.out


def test_a_dry_run_says_which_optimizer_trains_which_weight(cli: Cli, here: Path) -> None:
    words = (*WORDS, "--dry-run", "optim.name=muon", "optim.groups=[{match: '*norm*', lr_scale: 0.1}]")
    said = cli(*words).out
    assert "# muon     orthogonalizes in float32" in said
    assert ": matrices of linear layers inside the layers\n#          learning rate 0.02, weight decay 0.005\n" in said
    assert ": optim.groups: *norm*\n#          learning rate 0.0003, weight decay 0\n" in said
    # examples fit on a screen, and all names are there for the asking
    assert len([line for line in said.splitlines() if line.startswith("#")]) < 40
    assert "body.0.attention.inner.out_proj.weight" in cli(*words, "--all").out
    records = json.loads(cli(*words, "--json").out)["optimizer"]
    assert {record["optimizer"] for record in records} == {"muon", "adamw"}
    assert len({record["name"] for record in records}) == len(records) > 15
    refused = cli(*WORDS, "--all")
    assert (refused.code, refused.err) == (
        2,
        "error: --all names weights where nothing is trained: it needs --dry-run\n",
    )


def test_a_dry_run_looks_at_the_data(cli: Cli, here: Path) -> None:
    (here / "a.csv").write_text("label,text\n" + "".join(f"{n % 2},red cat {n}\n" for n in range(300)))
    words = ("train", "classify/intents", "data.path=a.csv", "data.tokenizer=byte", "data.vocab=null")
    words += ("data.max_length=11", "--dry-run")
    before = sorted(here.iterdir())
    ended = cli(*words)
    assert ended.code == 0, ended.err
    assert "# data     lengths: median 13, largest 13 tokens" in ended.out
    assert "# warning  290 of 300 texts (96.7%) are cut at 11 tokens" in ended.out
    assert max(len(line) for line in ended.out.splitlines() if line.startswith("# data")) <= 82
    assert sorted(here.iterdir()) == before
    facts = json.loads(cli(*words, "--json").out)["data"]["summary"]
    assert facts["lengths"]["largest"] == 13
    assert sum(facts["counts"].values()) == 300
    missing = cli("train", "classify/intents", "--dry-run")
    assert missing.code == 2
    assert "error: train.tsv: there is no such file (data.path)" in missing.err
    assert "parameters (vocabulary" in missing.out


def test_a_dry_run_has_the_size_of_the_model_that_training_makes(cli: Cli, here: Path) -> None:
    (here / "a.tsv").write_text("".join(f"red cat {n}\t{'xyz'[n % 3]}\n" for n in range(300)))
    words = ("train", "transformer-classifier", "data.path=a.tsv", "data.tokenizer=char", "limits.steps=1")
    words += ("batch.tokens=256", "model.dim=8", "model.heads=1", "model.ff_dim=8", "model.depth=1")
    dry = cli(*words, "--dry-run")
    facts = json.loads(cli(*words, "--dry-run", "--json").out)["model"]
    assert cli(*words, "out=run").code == 0
    size = sum(weight.numel() for weight in mf.load("run").parameters())
    assert facts == {"parameters": size, "assumption": None}
    assert f": {size:,} parameters (with this data)" in dry.out


@pytest.mark.parametrize("rows", [200, 12_000])
def test_a_dry_run_says_that_the_data_is_longer_than_the_model_as_training_does(
    cli: Cli, here: Path, rows: int
) -> None:
    """Of more than 10,000 rows the beginning is read."""
    (here / "a.tsv").write_text("".join(f"{'x' * (n % 40 + 1)}\t{'y' * (n % 7 + 1)}\n" for n in range(rows)))
    words = ("train", "transformer", "model.position=learned", "data.path=a.tsv", "data.tokenizer=char")
    words += ("batch.tokens=256", "model.dim=8", "model.heads=1", "model.ff_dim=8", "model.depth=1", "limits.steps=1")
    message = "error: the longest training pair has 41 tokens, but the model allows 40; leave such pairs out with "
    for more in (("--dry-run",), ("--dry-run", "--json"), *([()] if rows == 200 else [])):
        ended = cli(*words, "model.max_length=40", *more)
        assert ended.code == 2
        assert message in ended.err
    assert cli(*words, "model.max_length=41", "--dry-run").code == 0
    # a model takes the length of the data where none is set
    assert cli(*words, "--dry-run").code == 0
    (here / "a.txt").write_text("red cat " * 2000)
    words = ("train", "transformer-lm", "data.path=a.txt", "data.tokenizer=char", "data.length=128", "--dry-run")
    message = "error: a row (data.length) has 128 tokens, but the model allows 64; set data.length to that or less"
    assert message in cli(*words, "batch.tokens=512", "model.max_length=64").err


def test_help_of_a_run_has_its_keywords_and_values(cli: Cli, here: Path) -> None:
    ended = cli("train", "lm/stdlib", "--help", "optim.lr=0.125")
    assert ended.code == 0
    assert not (here / "runs").exists()
    for name in mf.recipes()["transformer-lm"].signature.parameters:
        assert any(line.startswith(f"  {name}=") for line in ended.out.splitlines())
    assert "  optim.lr=0.125 " in ended.out
    assert "  data.tokenizer=bpe " in ended.out
    assert "attention heads" in ended.out
    assert "  classes=" in cli("train", "transformer-classifier", "data.path=x.tsv", "-h").out


def test_an_empty_file_and_a_missing_one_are_refused(cli: Cli, here: Path) -> None:
    (here / "empty.txt").write_text("")
    for name in ("empty.txt", "missing.txt"):
        ended = cli("train", "transformer-lm", f"data.path={name}")
        assert ended.code == 2
        assert name in ended.err
        assert len(ended.err.splitlines()) == 1


def test_plot_draws_one_run_or_several(cli: Cli, here: Path, text_run: Path) -> None:
    assert cli("plot", str(text_run), "--out", "one.png").out == "one.png\n"
    assert (here / "one.png").read_bytes().startswith(PNG)
    assert cli("plot", str(text_run), str(text_run)).code == 0
    assert (here / "curves.png").read_bytes().startswith(PNG)
    assert cli("plot", str(text_run), "--out", "one.txt").code == 2


def test_on_a_terminal_there_is_a_bar(here: Path) -> None:
    """A real terminal: the bar is drawn, and nothing of it is left over when the end is told."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "manyformer", *WORDS],
        stdout=terminal,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(terminal)
    output = b""
    while True:
        try:
            piece = os.read(controller, 65536)
        except OSError:
            break
        if not piece:
            break
        output += piece
    os.close(controller)
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 0
    text = output.decode()
    assert "━" in text
    assert "\x1b[" in text
    assert text.rstrip().endswith("manyformer evaluate runs/transformer-lm")


def test_the_range_test_suggests_a_rate_and_leaves_no_run(cli: Cli, here: Path) -> None:
    ended = cli(*WORDS, "--find-lr")
    assert ended.code == 0, ended.err
    subjects = [line.split(" ")[0] for line in lines(ended.out) if not line.startswith(" ")]
    assert subjects == ["tried", "loss", "suggests", "because", "picture"]
    assert (here / "runs/transformer-lm-find-lr.png").read_bytes().startswith(PNG)
    assert not (here / "runs/transformer-lm").exists()
    test = json.loads(cli(*WORDS, "--find-lr", "--json").out)
    assert f"optim.lr={test['suggested']:g}" in ended.out
    assert test["rates"][0] == pytest.approx(1e-7)
    lowest = min(range(len(test["rates"])), key=test["smoothed"].__getitem__)
    assert test["rates"][0] < test["suggested"] < test["rates"][lowest]
    assert test["smoothed"][lowest] < 0.8 * test["smoothed"][0]
    # all of it again, to the last digit
    assert json.loads(cli(*WORDS, "--find-lr", "--json").out)["losses"] == test["losses"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("schedule.name=noam",), "noam sets the rate itself; set schedule.name=cosine"),
        (("devices=2",), "add devices=1"),
        (("--dry-run",), "goes with none of"),
    ],
)
def test_a_range_test_that_cannot_be_is_refused(words: tuple[str, ...], sentence: str, cli: Cli) -> None:
    ended = cli(*WORDS, "--find-lr", *words)
    assert ended.code == 2
    assert sentence in ended.err
