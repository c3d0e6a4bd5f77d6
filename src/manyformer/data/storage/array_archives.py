"""NumPy archives (.npz) of bounded size, read without pickle, and checks of their arrays.

An array is the member of its exact name (`x.npy` for `x`). Its header is read first, and what the header gives is
compared with a bound and with the bytes that the archive gives for the member; then that many bytes are read, and not
one more. The arrays of a data set are checked by shape, labels by their names, splits by their indices."""

import ast
import hashlib
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write
from manyformer.base.type_aliases import LogFn
from manyformer.data.batching.epochs import FIXED_SEED, random_generator
from manyformer.data.pipeline.summary import Finding, plural
from manyformer.nn.runtime.exact_shares import round_share

NO_LABEL = -1
"""The label of an item that has none."""
MAX_CLASSES = 1 << 16
"""The largest number of labels: an observation has as many outputs."""
SPLIT_NAMES = ("train", "valid", "test")
MAX_ARRAY_BYTES = 1 << 35
"""The most bytes of an array, or of all arrays of an archive together, that are read into memory."""
MAX_MEMBERS = 1 << 12
"""The most arrays of an archive."""
_SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_MAX_HEADER_BYTES = 10_000
"""The longest header of an array, as in NumPy."""
_LENGTH_FORMATS = {(1, 0): "<H", (2, 0): "<I", (3, 0): "<I"}
"""The format of the length of a header, by the version of the format of an array."""
_READ_KINDS = frozenset("biufU")
"""Truth values, numbers and texts; not objects (pickles), records, bytes of unknown encoding, or times."""
_PYTHON_2_INTEGER = re.compile(r"(?<=\d)L\b")
_CHUNK_BYTES = 1 << 24
# what zipfile and zlib raise for damaged, encrypted and unknown archives
_ARCHIVE_ERRORS = (
    *(OSError, ValueError, EOFError, RuntimeError, MemoryError, IndexError, OverflowError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)


class ArrayHeader(NamedTuple):
    """The header of an array: its shape, whether its first axis varies fastest, and its type."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """The bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class ArchiveMember(NamedTuple):
    """An array of an archive: the name that it is saved under, its number among the members, and its header."""

    name: str
    number: int
    header: ArrayHeader


def array_members(path: Path) -> dict[str, ArchiveMember]:
    """The arrays of an archive by name, as their headers declare them; no array is read.

    Raises UserError for a file that is no archive, and for a member that is no array, that is there twice, whose header
    is damaged, or that has other bytes than its header gives."""
    # numpy.load leaves the file open if it is no archive
    if not zipfile.is_zipfile(path):
        raise UserError(f"{path}: this is not a complete NumPy archive (.npz)")
    members: dict[str, ArchiveMember] = {}
    with _report_damage(f"{path}: this NumPy archive"), zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if len(infos) > MAX_MEMBERS:
            raise UserError(f"{path}: this archive has {len(infos):,} members, and at most {MAX_MEMBERS:,} are read")
        for number, info in enumerate(infos):
            if not info.filename.endswith(_SUFFIX):
                raise UserError(
                    f"{path}: its member {_short(info.filename)} is not saved as an array, with a name that ends in "
                    f"{_SUFFIX}; write the archive with numpy.savez"
                )
            name = info.filename.removesuffix(_SUFFIX)
            if name in members:
                raise UserError(f"{path}: there are two arrays {_short(name)} in it; leave one out")
            with archive.open(info) as file:
                # headers alone: an archive of many gigabytes is looked at without being unpacked
                header = _read_header(file, path, name)
                _check_member_size(info.file_size - file.tell(), header, path, name)
            members[name] = ArchiveMember(name, number, header)
    return members


def read_array(path: Path, member: ArchiveMember) -> NDArray[Any]:
    """An array of an archive, in the machine's byte order.

    Raises UserError if it is damaged or too large, and for objects, records and times."""
    name, number, header = member
    check_array_size(path, header.size, f"the array {name}")
    if header.dtype.hasobject:
        raise UserError(f"{path}: the array {name} cannot be read (Object arrays are pickles; save numbers or texts)")
    if header.dtype.kind not in _READ_KINDS or not header.dtype.itemsize:
        kind = _short(str(header.dtype))
        raise UserError(f"{path}: the array {name} is of type {kind}; save numbers, truth values or texts (str)")
    with (
        _report_damage(f"{path}: the array {name}"),
        zipfile.ZipFile(path) as archive,
        archive.open(archive.infolist()[number]) as file,
    ):
        # the file may have been replaced since its headers were read
        if _read_header(file, path, name) != header:
            raise UserError(f"{path}: the array {name} has changed while the archive was read")
        flat = np.frombuffer(_read_exactly(file, header.size, path, name), dtype=header.dtype)
        _check_values(flat, path, name)
        # a view of the bytes that were read: no second copy of a large array
        array = flat.reshape(header.shape, order="F" if header.fortran_order else "C")
        # torch takes no other byte order; a copy is made only where it must be
        return np.asarray(array, dtype=header.dtype.newbyteorder("="), order="C")


def read_arrays(
    path: Path, names: Collection[str], log: LogFn | None = None, *, ignored: Collection[str] = ()
) -> dict[str, NDArray[Any]]:
    """The arrays of an archive that have one of these names; the log names others, but for `ignored` ones.

    Raises UserError as `array_members` and `read_array` do, and where all together are too large."""
    members = array_members(path)
    chosen = [member for name, member in members.items() if name in names]
    # each may be small enough, and all together fill the memory
    check_array_size(path, sum(member.header.size for member in chosen), "the arrays that are read")
    if (
        log is not None
        and (line := describe_unread(path, [name for name in members if name not in ignored], names)) is not None
    ):
        log(line)
    return {member.name: read_array(path, member) for member in chosen}


def describe_unread(path: Path, members: Collection[str], names: Collection[str]) -> str | None:
    """A line about the arrays of an archive that are not read, None if all are: a name may be misspelled."""
    unread = [name for name in members if name not in names]
    if not unread:
        return None
    ellipsis = ", ..." if len(unread) > 10 else ""
    shown = ", ".join(_short(name) for name in unread[:10])
    reason = ""
    if names:
        reason = f" (arrays have the names {', '.join(names)})"
    return f"{path}: not read: {shown}{ellipsis}{reason}"


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


@contextmanager
def _report_damage(subject: str) -> Iterator[None]:
    """Say that `subject` cannot be read instead of an error of the libraries that read it."""
    try:
        yield
    except UserError:
        # it names its place already, and is a ValueError, too
        raise
    except _ARCHIVE_ERRORS as error:
        raise UserError(f"{subject} cannot be read ({error})") from error


def _read_header(file: IO[bytes], path: Path, name: str) -> ArrayHeader:
    """The header of an array, after which its values begin. Raises UserError with the name of the array."""
    prefix = file.read(len(_MAGIC) + 2)
    version = tuple(prefix[len(_MAGIC) :])
    if not prefix.startswith(_MAGIC) or version not in _LENGTH_FORMATS:
        start = prefix.hex(" ") or "nothing"
        raise _damaged_header(path, name, f"it starts with {start}, and not as an array of format 1 to 3")
    length_format = _LENGTH_FORMATS[version]
    length_bytes = file.read(struct.calcsize(length_format))
    if len(length_bytes) < struct.calcsize(length_format):
        raise _damaged_header(path, name, "it is incomplete")
    (length,) = struct.unpack(length_format, length_bytes)
    if length > _MAX_HEADER_BYTES:
        raise _damaged_header(path, name, f"it has {length:,} bytes, more than {_MAX_HEADER_BYTES:,}")
    content = file.read(length)
    if len(content) < length:
        raise _damaged_header(path, name, "it is incomplete")
    try:
        text = content.decode("utf-8" if version == (3, 0) else "latin-1")
        fields = ast.literal_eval(_PYTHON_2_INTEGER.sub("", text))
        shape = fields["shape"]
        fortran_order = fields["fortran_order"]
        dtype = np.lib.format.descr_to_dtype(fields["descr"])
    # MemoryError and RecursionError are those of the parser for deep nesting
    except (ValueError, SyntaxError, TypeError, KeyError, IndexError, MemoryError, RecursionError) as error:
        raise _damaged_header(path, name, str(error) or type(error).__name__) from None
    # exact types: True is an int, too
    if type(fortran_order) is not bool or type(shape) is not tuple or any(type(size) is not int for size in shape):
        raise _damaged_header(path, name, f"it gives the shape {_short(str(shape))}")
    if any(size < 0 for size in shape):
        raise _damaged_header(path, name, f"it gives negative dimensions, {_short(str(shape))}")
    return ArrayHeader(shape, fortran_order, dtype)


def _damaged_header(path: Path, name: str, reason: str) -> UserError:
    return UserError(f"{path}: the header of the array {_short(name)} cannot be read ({_short(reason)})")


def _check_member_size(actual: int, header: ArrayHeader, path: Path, name: str) -> None:
    """Raise UserError unless a member has as many bytes after its header as the header gives."""
    # pickled objects have any length, and are refused where they are read
    if header.dtype.hasobject or header.size == actual:
        return
    # the bound comes first: no file of that size would help
    check_array_size(path, header.size, f"the array {name}")
    problem = "incomplete" if actual < header.size else "damaged"
    raise UserError(
        f"{path}: the array {_short(name)} is {problem}: its header gives {header.size:,} bytes, but it has {actual:,}"
    )


def _read_exactly(file: IO[bytes], size: int, path: Path, name: str) -> bytearray:
    """The bytes of an array, piece by piece: memory is taken for what is there, whatever the archive gives."""
    content = bytearray()
    while len(content) < size:
        piece = file.read(min(_CHUNK_BYTES, size - len(content)))
        if not piece:
            raise UserError(f"{path}: the array {name} is incomplete: {len(content):,} of {size:,} bytes can be read")
        content += piece
    # at the end the archive's sum is compared
    if file.read(1):
        raise UserError(f"{path}: the array {name} is damaged: it has more than the {size:,} bytes of its header")
    return content


def _check_values(values: NDArray[Any], path: Path, name: str) -> None:
    """Raise UserError for bytes that are no truth value or no character, which NumPy would take as they are."""
    if values.dtype.kind == "b" and (values.view(np.uint8) > 1).any():
        raise UserError(f"{path}: the array {name} is damaged: a truth value is neither 0 nor 1")
    if values.dtype.kind == "U":
        codes = values.view(values.dtype.str[0] + "u4")
        is_surrogate = (codes >= 0xD800) & (codes <= 0xDFFF)
        if ((codes > 0x10FFFF) | is_surrogate).any():
            raise UserError(f"{path}: the array {name} is damaged: a text has a character that Unicode does not have")


def _short(text: str) -> str:
    """A text for messages, of bounded length and without control characters."""
    if len(text) > 120:
        return f"{text[:120]}..."
    return text


def whole_numbers(
    arrays: Mapping[str, NDArray[Any]], key: str, shape: tuple[int | None, ...], name: str
) -> NDArray[np.int64]:
    """The array called `key`. Raises UserError unless it has whole numbers and this shape; None is any size."""
    array = arrays[key]
    # checked before `astype`, which would round numbers and take texts of digits
    if array.dtype.kind not in "iu" or not has_shape(array, shape):
        raise UserError(
            f"{name}: {key} must be whole numbers of shape {shape_text(shape)}, and is {describe_array(array)}"
        )
    # unsigned numbers of 64 bits would become negative
    if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
        raise UserError(f"{name}: {key} has the number {array.max():,}, which is too large")
    return array.astype(np.int64)


def check_numbers(
    arrays: Mapping[str, NDArray[Any]],
    key: str,
    shape: tuple[int | None, ...],
    name: str,
    *,
    place: Callable[[int], str],
) -> NDArray[np.float32]:
    """The array called `key`. Raises UserError unless it has this shape, None being any size, and numbers that are
    finite in 32 bits too; `place` names what a number on the first axis stands for, such as "node 3"."""
    array = arrays[key]
    if array.dtype.kind not in "fiub" or not has_shape(array, shape) or 0 in array.shape:
        raise UserError(f"{name}: {key} must be numbers of shape {shape_text(shape)}, and is {describe_array(array)}")
    invalid = ~is_finite_in_32_bits(array).reshape(len(array), -1).all(1)
    if invalid.any():
        raise UserError(f"{name}: the {key} of {place(int(invalid.argmax()))} are no finite numbers")
    return array.astype(np.float32)


def is_finite_in_32_bits(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each number is finite, also as the 32-bit floating point number that a model reads."""
    finite: NDArray[np.bool_] = np.isfinite(array)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        finite &= np.abs(array) <= np.finfo(np.float32).max
    return finite


def check_labels(labels: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]], name: str) -> tuple[str, ...]:
    """The names of the labels. Raises UserError for labels that cannot be learned."""
    highest = int(labels.max(initial=NO_LABEL))
    if int(labels.min(initial=0)) < NO_LABEL or highest >= MAX_CLASSES:
        raise UserError(f"{name}: labels must be 0 to {MAX_CLASSES - 1:,}, or -1 for none")
    if len(np.unique(labels[labels != NO_LABEL])) < 2:
        raise UserError(f"{name}: there must be two different labels at least, and there is nothing to learn")
    if "label_names" not in arrays:
        return tuple(map(str, range(highest + 1)))
    names = arrays["label_names"]
    if names.dtype.kind != "U" or names.shape != (max(len(names.ravel()), highest + 1),):
        raise UserError(f"{name}: label_names must be a text for each of {highest + 1} labels")
    return tuple(names.tolist())


def read_splits(
    arrays: Mapping[str, NDArray[Any]], labels: NDArray[np.int64], name: str
) -> dict[str, NDArray[np.int64]]:
    """The indices of each split. Raises UserError for those that are out of range, shared, or without any label."""
    splits = {key: whole_numbers(arrays, key, (None,), name) for key in SPLIT_NAMES if key in arrays}
    owners: dict[int, str] = {}
    # an item in two splits would be learned and scored
    for split, index in splits.items():
        if len(index) and not 0 <= index.min() <= index.max() < len(labels):
            raise UserError(f"{name}: {split} must be numbers from 0 to {len(labels) - 1}")
        for item in index.tolist():
            if owners.setdefault(item, split) != split:
                raise UserError(
                    f"{name}: {split} and {owners[item]} share the number {item}, which may be in one of them"
                )
        if not (labels[index] != NO_LABEL).any():
            raise UserError(f"{name}: there is no label to learn or to score in {split}")
    return splits


def complete_splits(
    named: Mapping[str, NDArray[np.int64]], labels: NDArray[np.int64], valid: float, path: str
) -> dict[str, NDArray[np.int64]]:
    """The splits that an archive names, and others drawn from the rest of the items that have a label.

    `valid` is the fraction that is validation data if none is named. Raises UserError if nothing is left to learn."""
    splits = dict(named)
    # what the archive puts in a split is not drawn into another one
    free = np.setdiff1d(
        np.flatnonzero(labels != NO_LABEL), np.concatenate([np.zeros(0, dtype=np.int64), *splits.values()])
    )
    if "valid" not in splits:
        pool = splits.get("train", free)
        # the same items in every run, so that scores of runs can be compared
        drawn = random_generator(FIXED_SEED).permutation(pool)
        count = max(1, round_share(valid, len(pool)))
        splits["valid"] = np.sort(drawn[:count])
        splits["train"] = np.sort(drawn[count:])
    splits.setdefault("train", free)
    if not len(splits["train"]):
        raise UserError(f"{path}: there is no label to learn; too few are left when some are held out")
    return {name: splits[name] for name in SPLIT_NAMES if name in splits}


def count_labels(labels: NDArray[np.int64], label_names: Sequence[str]) -> dict[str, int]:
    """The number of items with each label, by its name; items without a label are not counted."""
    numbers, counts = np.unique(labels[labels != NO_LABEL], return_counts=True)
    return {label_names[number]: int(count) for number, count in zip(numbers, counts, strict=True)}


def unused_items(splits: Mapping[str, NDArray[np.int64]], labels: NDArray[np.int64], noun: str) -> Iterator[Finding]:
    """The findings about items that have no label, or have one and are in no split."""
    in_split = np.zeros(len(labels), dtype=bool)
    in_split[np.concatenate(list(splits.values()))] = True
    has_label = labels != NO_LABEL
    yield from find_items(~has_label, noun, "without a label")
    yield from find_items(has_label & ~in_split, noun, "in no split, neither learned nor scored")


def find_items(is_found: NDArray[np.bool_], noun: str, text: str) -> Iterator[Finding]:
    """The finding about these items, if there are any; `text` are the words that follow their number."""
    if count := int(is_found.sum()):
        yield Finding(count, f"{plural(count, noun)} {text}", f"{noun} {int(is_found.argmax())}")


def has_shape(array: NDArray[Any], shape: tuple[int | None, ...]) -> bool:
    """Whether an array has these sizes, None being any."""
    return array.ndim == len(shape) and all(size in (None, actual) for size, actual in zip(shape, array.shape))


def shape_text(shape: tuple[int | None, ...]) -> str:
    """A shape for messages."""
    return f"({', '.join('any' if size is None else str(size) for size in shape)})"


def describe_array(array: NDArray[Any]) -> str:
    """The type and shape of an array for messages."""
    return f"{array.dtype} of shape {array.shape}"
