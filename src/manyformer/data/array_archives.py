"""NumPy archives (.npz) of bounded size, read without pickle."""

import hashlib
import math
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write

_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
# what zipfile, zlib and NumPy raise for damaged, encrypted and unknown archives
_ARCHIVE_ERRORS = (OSError, ValueError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, MemoryError)
MAX_ARRAY_BYTES = 1 << 35
"""The largest array that is read into memory."""


def array_sizes(path: Path) -> dict[str, int]:
    """The bytes of each array in an archive, as the arrays' headers declare them. Raises UserError for other files."""
    # numpy.load leaves the file open if it is no archive
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: this is not a complete NumPy archive (.npz)")
    sizes: dict[str, int] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for member in (member for member in archive.infolist() if member.filename.endswith(".npy")):
                with archive.open(member) as file:
                    version = np.lib.format.read_magic(file)
                    read_header = _HEADER_READERS[version]
                    shape, _, dtype = read_header(file)
                    sizes[member.filename.removesuffix(".npy")] = math.prod(shape) * dtype.itemsize
    except (*_ARCHIVE_ERRORS, KeyError) as error:
        raise UserError(f"{path}: this NumPy archive cannot be read ({error})") from error
    return sizes


def read_array(path: Path, name: str, size: int) -> NDArray[Any]:
    """The array of that name and size in bytes. Raises UserError if it is too large or cannot be read."""
    check_array_size(path, size, f"the array {name}")
    try:
        with np.load(path) as archive:
            array: NDArray[Any] = archive[name]
    except _ARCHIVE_ERRORS as error:
        raise UserError(f"{path}: the array {name} cannot be read ({error})") from error
    return array


def check_array_size(path: Path, size: int, name: str) -> None:
    """Raise UserError for an array that is too large to be read into memory."""
    if size > MAX_ARRAY_BYTES:
        raise UserError(f"{path}: {name} has {size:,} bytes, and at most {MAX_ARRAY_BYTES:,} are read; split the file")


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write an archive with these arrays."""
    with atomic_write(path) as file:
        # NumPy's annotation takes the arrays for its own keyword `allow_pickle`
        np.savez(file, **cast(dict[str, Any], arrays))


def hash_arrays(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A hash of all arrays; that of their archive would depend on the time at which it was written."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
