"""Homes that are missing, no folders, endless links, or those of a user whom the system does not know."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import manyformer as mf

EVERY_VERB = """
import contextlib, io, sys
from pathlib import Path
import manyformer as mf
from manyformer.cli import COMMANDS, run
for name in COMMANDS:
    with contextlib.redirect_stdout(io.StringIO()):
        assert run([name, "--help"]) == 0, name
model, out = sys.argv[1:]
print(mf.generate(mf.load(model), [[5, 6]], max_new=3))
words = ["data.path=text.txt", "data.tokenizer=char", "data.length=16", "dim=16", "depth=1", "heads=2"]
words += ["batch.tokens=64", "limits.steps=2", "evaluate.every=null", f"out={out}", "--quiet"]
assert run(["train", "transformer-lm", *words]) == 0
assert run(["plot", out]) == 0
assert mf.explain(mf.load(out), __import__("torch").zeros(1, 4, dtype=__import__("torch").long))
"""


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder that every user may enter, with a text and a model."""
    folder = Path(tempfile.mkdtemp(prefix="homes-"))
    folder.chmod(0o777)
    text = "to be or not to be, that is the question\n" * 50
    (folder / "text.txt").write_text(text)
    model: Any = mf.build("transformer-lm", vocab=259, dim=16, depth=1, heads=2, max_length=32)
    model.save(folder / "model")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "nowhere").symlink_to(folder / "missing")
    (folder / "file").write_text("")
    (folder / "full").mkdir()
    (folder / "full" / ".cache").write_text("")
    (folder / "tuned" / ".cache" / "manyformer").mkdir(parents=True)
    # what an earlier version read
    (folder / "tuned" / ".cache" / "manyformer" / "costs.json").write_bytes(b"\0" * 100)
    yield folder
    shutil.rmtree(folder)


def run_everything(
    place: Path, name: str, home: str | None, *, before: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "HOME"}
    variables |= {"OMP_NUM_THREADS": "1"} | ({} if home is None else {"HOME": home})
    command = [*before, sys.executable, "-c", EVERY_VERB, "model", f"out-{name}"]
    return subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("name", ["missing", "file", "loop", "full", "tuned"])
def test_all_works_without_a_home_that_can_be_read(place: Path, name: str) -> None:
    ended = run_everything(place, name, str(place / name))
    assert ended.returncode == 0, ended.stderr
    assert "cannot be read" not in ended.stderr
    assert "damaged" not in ended.stderr


def test_parts_of_matplotlib_can_be_imported_before_a_figure_is_made(place: Path) -> None:
    script = "import manyformer.analysis.pruning; from matplotlib.ticker import MaxNLocator"
    variables = {**os.environ, "HOME": str(place / "loop")}
    variables.pop("MPLCONFIGDIR", None)
    ended = subprocess.run([sys.executable, "-c", script], env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or shutil.which("setpriv") is None, reason="another user needs root, and setpriv")
def test_all_works_for_a_user_without_an_entry(place: Path) -> None:
    """As in a container that runs under any number: nothing says where its home is."""
    ended = run_everything(place, "stranger", None, before=("setpriv", "--reuid", "12345", "--clear-groups"))
    if "ermission denied" in ended.stderr and sys.executable in ended.stderr:
        pytest.skip("the Python of these tests may not be run by another user")
    assert ended.returncode == 0, ended.stderr
