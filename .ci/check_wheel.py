"""What must hold where the wheel is installed: the command, the files beside the code, and nothing loaded too early."""

import subprocess
import sys
from pathlib import Path

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
