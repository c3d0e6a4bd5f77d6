"""`show --pattern`: who may look at whom, in the terminal and as a picture."""

import json
from pathlib import Path

from commands import Cli


def test_a_pattern_is_drawn(cli: Cli, tmp_path: Path) -> None:
    out = cli("show", "longformer", "window=1", "global_tokens=1", "depth=2", "--pattern", "--length", "6").out
    assert "Window(2, lookahead=1) | VisibleToAll(FirstTokens(1) | WithRole(1))" in out
    assert "body.0.attention.inner.local_kernel and 1 more, 6 tokens" in out
    assert "··███·" not in out.splitlines()
    assert "█·███·" in out.splitlines()
    picture = tmp_path / "pattern.png"
    ended = cli("show", "bigbird-lm", "depth=1", "--pattern", "--out", str(picture))
    assert "█" in ended.out
    assert picture.stat().st_size > 1000


def test_summaries_stand_before_the_text(cli: Cli) -> None:
    out = cli("show", "etc", "window=1", "part_length=2", "depth=1", "--pattern", "--length", "4").out
    assert "the first 2 summaries, 6 tokens, queries downwards" in out
    assert out.splitlines()[-7:-1] == ["██████", "██████", "████··", "█████·", "██·███", "██··██"]


def test_a_causal_mask_is_a_triangle(cli: Cli) -> None:
    words = ("show", "transformer-lm", "depth=1", "--pattern", "--length", "3")
    assert cli(*words).out.splitlines()[-4:-1] == ["█··", "██·", "███"]
    assert json.loads(cli(*words, "--json").out) == [{"mask": "Causal()", "modules": ["body.0.attention.inner.kernel"]}]


def test_the_first_of_many_masks_is_drawn_and_the_others_are_named(cli: Cli, tmp_path: Path) -> None:
    words = ["show", "longformer-lm", "depth=3", "window=2", "top_window=4", "--pattern", "--length", "6"]
    first = cli(*words)
    assert first.out.splitlines()[0] == "Window(2)"
    assert len(first.out.splitlines()) < 12
    assert first.err.count("--all draws it") == 2
    assert "Window(3)" in first.err
    every = cli(*words, "--all")
    assert every.err == ""
    assert "Window(3)" in every.out
    assert len(list(tmp_path.iterdir())) == 0
    cli(*words, "--out", str(tmp_path / "mask.png"))
    assert len(list(tmp_path.iterdir())) == 3


def test_options_of_the_pattern_alone_are_refused(cli: Cli) -> None:
    for option in (["--out", "picture.png"], ["--properties", "--all"]):
        ended = cli("show", "transformer-lm", *option)
        assert ended.code == 2
        assert "is for --pattern" in ended.err


def test_mixing_is_printed_drawn_and_written_as_json(cli: Cli, tmp_path: Path) -> None:
    picture = tmp_path / "mixing.png"
    printed = cli("show", "performer", "--mixing", "--length", "6", "--out", str(picture))
    assert printed.out.splitlines()[0] == "performer: tiny sizes, random weights, 6 random tokens"
    assert printed.out.splitlines()[2] == "█·····"
    assert picture.read_bytes().startswith(b"\x89PNG")
    record = json.loads(cli("show", "performer", "--mixing", "--length", "6", "--json").out)
    assert len(record["strengths"]) == record["length"] == 6
    for words, message in (
        (["vit", "--mixing"], "vit has one output for all tokens"),
        (["vit", "--mixing", "--pattern"], "give either --pattern or --mixing, not both"),
        (["performer", "--mixing", "--all"], "--all is for --pattern"),
    ):
        ended = cli("show", *words)
        assert (ended.code, message in ended.err) == (2, True), ended.err
