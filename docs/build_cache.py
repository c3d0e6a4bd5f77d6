"""Where a build of the site keeps outputs of notebooks and pictures, which are slow to compute, by their content."""

import hashlib
import shutil
import sys
from functools import cache
from importlib.metadata import version
from pathlib import Path

import manyformer

PACKAGE = Path(manyformer.__file__).parent


@cache
def package_digest() -> str:
    """The content of all files of the package, and what computes; results are computed again when these change."""
    digest = hashlib.sha256(f"{sys.version} {version('torch')} {version('matplotlib')}".encode())
    for file in sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
        digest.update(f"{file.relative_to(PACKAGE)}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def notebook_cache(folder: Path) -> Path:
    """The folder below `folder` for outputs with this package; those of earlier states of it are removed."""
    for path in folder.glob("*"):
        if path.name != package_digest():
            shutil.rmtree(path)
    return folder / package_digest()
