"""`show --pattern`: who may look at whom, in the terminal and as a picture."""

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
    ended = cli("show", "transformer-lm", "--pattern", "--length", "3")
    assert ended.out.splitlines()[-4:-1] == ["█··", "██·", "███"]
