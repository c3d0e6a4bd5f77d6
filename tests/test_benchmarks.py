"""The scripts of benchmarks/ fit the library: each can be imported, in one process that imports them all."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPT = """
import importlib, sys
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}")
"""


def test_every_script_is_importable() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py"))
    assert len(names) > 30
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names], cwd=FOLDER, capture_output=True, text=True, check=True
    )
    assert not done.stdout, done.stdout
