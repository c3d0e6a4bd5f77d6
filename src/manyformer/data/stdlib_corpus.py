"""The default corpus for language models: the source of the running Python's standard library, without a download."""

import os
import sysconfig
from pathlib import Path

from manyformer.errors import UserError

# Tests are half of the library and unlike the remaining code; `encodings` holds tables of characters, from which a
# small model learns to generate CAPITAL LETTER; the remaining folders are not part of the library proper.
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "encodings", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
MIN_BYTES = 1_000_000


def stdlib_files(folder: Path | None = None) -> list[Path]:
    """The .py files sorted by path. Raises UserError if the library has less than `MIN_BYTES` of source."""
    if folder is None:
        root = Path(sysconfig.get_paths()["stdlib"])
    else:
        root = folder
    paths: list[Path] = []
    for directory, subfolders, names in os.walk(root):
        # Pruned during the walk: site-packages can hold a hundred times as many files.
        subfolders[:] = [name for name in subfolders if name not in EXCLUDED_FOLDERS]
        paths += [Path(directory, name) for name in names if name.endswith(".py")]
    paths.sort(key=lambda path: path.relative_to(root).parts)
    readable = [path for path in paths if path.is_file() and path.stat().st_size and _is_utf8(path)]
    size = sum(path.stat().st_size for path in readable)
    if size < MIN_BYTES:
        raise UserError(
            f"the standard library of this Python ({root}) holds only {size:,} bytes of source text, too little "
            "to learn from; give your own text with data.path=FILE_OR_FOLDER"
        )
    return readable


def _is_utf8(path: Path) -> bool:
    # Some files deliberately declare another encoding.
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True
