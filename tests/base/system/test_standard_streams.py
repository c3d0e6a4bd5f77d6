"""Standard streams that are closed, narrow in their characters, full, or left by their reader."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# a title with letters beyond Latin-1, in the encoding of the terminal or escaped
WORDS = ("show", "transformer-lm", "--json")
NARROW = [
    {"PYTHONIOENCODING": "ascii"},
    {"PYTHONIOENCODING": "latin-1"},
    {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
]


def run_in_shell(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    program = f'"{sys.executable}" -m manyformer {command}'
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(["sh", "-c", program], capture_output=True, env=environment, check=False, timeout=120)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_the_null_device(closed: str) -> None:
    ended = run_in_shell(f"runs {closed}")
    assert ended.returncode == 0
    assert ended.stderr == b""
    assert (b"lm/stdlib" in ended.stdout) == (">&- " not in f"{closed} " or closed == "2>&-")


def test_a_file_does_not_get_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What is printed later must not be written into a file that happens to be open."""
    code = (
        "from manyformer.base.system import prepare_streams; prepare_streams(); "
        f"file = open({str(tmp_path / 'data')!r}, 'w'); print('noise', flush=True); assert file.fileno() > 2"
    )
    ended = subprocess.run(["sh", "-c", f'"{sys.executable}" -c "{code}" >&- <&-'], capture_output=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert (tmp_path / "data").read_text() == ""


@pytest.mark.parametrize("variables", NARROW)
def test_json_stays_json_in_an_encoding_without_some_characters(variables: dict[str, str]) -> None:
    code = (
        "import sys; from manyformer.base.system import prepare_streams; prepare_streams(); "
        "from manyformer.cli.console import json_line, print_json, print_text; "
        "value = {'text': 'caf\\xe9 \\u65e5 \\U0001f600'}; print_text(json_line(value)); print_json(value)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, **variables}, check=True
    )
    line, document = ended.stdout.decode("ascii").split("\n", 1)
    assert json.loads(line) == json.loads(document) == {"text": "café 日 😀"}


@pytest.mark.parametrize("variables", NARROW)
def test_characters_that_the_output_cannot_show_are_escaped(variables: dict[str, str]) -> None:
    code = (
        "from manyformer.base.system import prepare_streams; prepare_streams(); "
        "import sys; print('\\u65e5 caf\\xe9'); print('\\u65e5', file=sys.stderr)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, **variables}, check=True
    )
    assert ended.stdout.startswith(rb"\u65e5 caf")
    assert ended.stderr == b"\\u65e5\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full, a device that is always full, is Linux's")
def test_a_full_standard_output_is_named() -> None:
    ended = run_in_shell("list > /dev/full")
    assert ended.returncode == 2
    assert ended.stderr == b"error: No space left on device: standard output could not be written\n"
