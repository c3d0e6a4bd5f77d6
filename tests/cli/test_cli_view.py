"""view and attention: a page for a run, and what a model looks at as text, as JSON and as a picture."""

import json
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

from commands import Cli, lines


def test_a_run_gives_a_page(cli: Cli, pairs_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = cli("view", str(pairs_run), "red tan", "--answer", "nat", "--out", str(page))
    assert result.code == 0, result.err
    content = page.read_text(encoding="utf-8")
    assert "decoder.0.cross" in content
    assert str(pairs_run) in content


def test_a_tagger_shows_a_held_out_sentence_or_one_of_a_file(cli: Cli, trees_run: Path, tmp_path: Path) -> None:
    page, data = tmp_path / "page.html", trees_run.parents[1] / "trees.conllu"
    for arguments in ((), (str(data),)):
        result = cli("view", str(trees_run), *arguments, "--out", str(page))
        assert result.code == 0, result.err
        assert "body.0.attention" in page.read_text(encoding="utf-8")
        page.unlink()
    refused = cli("view", str(trees_run), "--serve")
    assert (refused.code, "is shown without --serve and --answer" in refused.err) == (2, True)


def test_view_writes_nothing_where_it_fails(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = cli("view", str(text_run), "the", "--answer", "cat", "--out", str(page))
    assert (result.code, page.exists()) == (2, False)
    assert "only an encoder-decoder writes an answer" in result.err
    assert "reads a text: give one after the name of the run" in cli("view", str(text_run)).err
    result = cli("view", str(text_run), "the", "--out", str(tmp_path / "page.pdf"))
    assert result.code == 2
    assert "page.pdf must end in .html" in result.err


def test_view_refuses_options_that_contradict_each_other(cli: Cli, text_run: Path) -> None:
    assert (
        "--out writes a page and --serve writes none"
        in cli("view", str(text_run), "a", "--serve", "--out", "a.html").err
    )
    assert "--port is for --serve" in cli("view", str(text_run), "a", "--port", "80").err


def test_a_reader_of_a_pipe_learns_the_address_while_the_server_still_serves(text_run: Path) -> None:
    command = [sys.executable, "-m", "manyformer", "view", str(text_run), "to be", "--serve", "--port", "0"]
    # as a script that reads the address has it, without PYTHONUNBUFFERED
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as server:
        assert server.stdout is not None
        try:
            readable, _, _ = select.select([server.stdout], [], [], 120)
            assert readable
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\n", server.stdout.readline())
            assert server.poll() is None
        finally:
            server.send_signal(signal.SIGINT)


def test_attention_says_what_a_translation_looked_at(cli: Cli, pairs_run: Path, tmp_path: Path) -> None:
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


def test_attention_refuses_what_it_cannot_show(cli: Cli, text_run: Path, trees_run: Path) -> None:
    assert cli("attention", str(text_run), "the cat").code == 0
    assert "only an encoder-decoder writes" in cli("attention", str(text_run), "the", "--answer", "cat").err
    assert "layer (9) must be 1 to 1" in cli("attention", str(text_run), "the", "--layer", "9").err
    assert "there is no part 'cross'" in cli("attention", str(text_run), "the", "--module", "cross").err
    assert "tagging reads no plain text" in cli("attention", str(trees_run), "cats").err
