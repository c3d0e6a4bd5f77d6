"""attention: what a model looks at, as text, as JSON and as a picture."""

import json
from pathlib import Path

from commands import Cli, lines


def test_a_translation_is_told_with_what_it_looked_at(cli: Cli, pairs_run: Path, tmp_path: Path) -> None:
    picture = tmp_path / "look.png"
    ended = cli("attention", str(pairs_run), "red tan", "--answer", "nat", "--out", str(picture))
    assert ended.code == 0, ended.err
    first, *rows = lines(ended.out)
    assert first == f"{pairs_run}: decoder.0.cross, mean of 2 heads"
    assert [row.split()[0] for row in rows] == ["n", "a", "t", "<eos>"]
    assert picture.stat().st_size > 1000
    assert "relative to the largest weight of their row" in ended.err
    heads = lines(cli("attention", str(pairs_run), "red", "--answer", "d", "--heads").out)
    assert [row for row in heads if ": " in row] == [f"{pairs_run}: decoder.0.cross, head {head}" for head in (0, 1)]
    drawn = tmp_path / "with-json.png"
    actual = json.loads(cli("attention", str(pairs_run), "red", "--json", "--out", str(drawn)).out)[str(pairs_run)]
    assert drawn.stat().st_size > 1000
    assert {one["part"] for one in actual} == {"encoder.0.attention", "decoder.0.attention", "decoder.0.cross"}


def test_mistakes_are_told(cli: Cli, text_run: Path, trees_run: Path) -> None:
    assert cli("attention", str(text_run), "the cat").code == 0
    assert "only an encoder-decoder writes" in cli("attention", str(text_run), "the", "--answer", "cat").err
    assert "layer (9) must be 1 to 1" in cli("attention", str(text_run), "the", "--layer", "9").err
    assert "there is no part 'cross'" in cli("attention", str(text_run), "the", "--module", "cross").err
    assert "tagging reads no plain text" in cli("attention", str(trees_run), "cats").err
