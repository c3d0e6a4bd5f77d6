"""The default corpus for language models: the source of this Python's own standard library, not downloaded."""

import os
import sysconfig
from pathlib import Path

from manyformer.errors import UserError

# Tests are half of the library and unlike the rest; `encodings` holds tables of characters, from which a small model
# learns to write CAPITAL LETTER; the others are not part of the library proper.
LEFT_OUT = frozenset(
    {"test", "tests", "encodings", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
SMALLEST = 1_000_000


def files(folder: Path | None = None) -> list[Path]:
    """The .py files in order of their names; UserError where the library is stripped to less than a megabyte."""
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found: list[Path] = []
    for place, folders, names in os.walk(root):
        # Pruned here rather than later: site-packages can hold a hundred times as many files.
        folders[:] = [name for name in folders if name not in LEFT_OUT]
        found += [Path(place, name) for name in names if name.endswith(".py")]
    found.sort(key=lambda path: path.relative_to(root).parts)
    kept = [path for path in found if path.is_file() and path.stat().st_size and _readable(path)]
    size = sum(path.stat().st_size for path in kept)
    if size < SMALLEST:
        raise UserError(
            f"the standard library of this Python ({root}) holds only {size:,} bytes of source text, too little "
            "to learn from; give your own text with data.path=FILE_OR_FOLDER"
        )
    return kept


def _readable(path: Path) -> bool:
    # A few files declare another encoding, as examples of just that.
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
