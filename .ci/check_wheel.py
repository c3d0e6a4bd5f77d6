"""What must hold where the wheels are installed: commands, files beside the code, and nothing loaded too early."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import manyformer_check

import manyformer
from manyformer.cli.options import complete_recipes

folder = Path(manyformer.__file__).parent
assert folder.is_relative_to(sys.prefix), f"{folder} is not the wheel's"
assert "reformer" in complete_recipes(), "completion in shells finds no recipes"
assert "torch" not in sys.modules
for name in (
    "py.typed",
    "config/experiments/lm/stdlib.yaml",
    "analysis/viewer/page.html",
    "analysis/viewer/page.css",
    "analysis/viewer/page.js",
):
    assert (folder / name).is_file(), f"the wheel lacks {name}"
command = Path(sys.executable).with_name("manyformer")
for words in (["--version"], ["list", "transformer-lm"], ["runs", "show", "lm/stdlib"]):
    output = subprocess.run([command, *words], capture_output=True, text=True, check=True).stdout
    assert (manyformer.__version__ if words == ["--version"] else "transformer-lm") in output, output

# the package of the checks alone, beside the other one
assert manyformer_check.__version__ == manyformer.__version__
files = [{str(file) for file in importlib.metadata.files(name) or ()} for name in ("manyformer", "manyformer-check")]
assert not files[0] & files[1], "the two packages have files in common"
output = subprocess.run([f"{command}-check", "--help"], capture_output=True, text=True, check=True).stdout
assert "model.py:GPT" in output, output
pytest = [sys.executable, "-m", "pytest", "--fixtures", "--contracts", "--help"]
output = subprocess.run(pytest, capture_output=True, text=True, check=True).stdout
assert output.count("--contracts ") == 1, "the plugin of pytest is not there, or twice"
