"""view: a page for a run."""

import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

from commands import Cli


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


def test_mistakes_write_nothing(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = cli("view", str(text_run), "the", "--answer", "cat", "--out", str(page))
    assert (result.code, page.exists()) == (2, False)
    assert "only an encoder-decoder writes an answer" in result.err
    assert "reads a text: give one after the name of the run" in cli("view", str(text_run)).err
    result = cli("view", str(text_run), "the", "--out", str(tmp_path / "page.pdf"))
    assert result.code == 2
    assert "page.pdf must end in .html" in result.err


def test_contradictions_are_refused(cli: Cli, text_run: Path) -> None:
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
