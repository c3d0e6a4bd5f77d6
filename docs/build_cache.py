"""Where a build of the site keeps outputs of notebooks and pictures, which are slow to compute, by their content."""

import hashlib
from functools import cache
from pathlib import Path

import manyformer

PACKAGE = Path(manyformer.__file__).parent


@cache
def package_digest() -> str:
    """The content of all files of the package; results of its commands are computed again when it changes."""
    digest = hashlib.sha256()
    for file in sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
