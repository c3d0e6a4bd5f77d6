"""The syntax trees of the library, the tests and the like, parsed once in a process."""

import ast
import functools
import gc
from pathlib import Path


@functools.cache
def trees_below(folder: Path) -> dict[Path, ast.Module]:
    """The tree of each Python file of a folder, for reading alone; garbage collection does not look through them."""
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in sorted(folder.rglob("*.py"))}
    gc.collect()
    gc.freeze()
    return trees
