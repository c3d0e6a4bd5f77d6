"""Folders of several files: verified by a manifest before a file is read, and marked while they are unfinished.

The manifest holds the size and the SHA-256 of every file."""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, NamedTuple, final

from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import make_folder, remove_drafts, report_not_written, sync_folder
from manyformer.base.files.json_records import AS_OBJECT, Count, DamagedFile, FileName, FileRecord, Sha256

MANIFEST = "manifest.json"
_MEMORY = ".verified.json"
MARK = ".unfinished.json"


class FileSum(NamedTuple):
    """The size of a file in bytes and its SHA-256."""

    size: Count
    sha256: Sha256


class Manifest(FileRecord):
    """The files of a folder, by name."""

    title = "the list of files of a folder"
    format_number = 2
    files: dict[FileName, Annotated[FileSum, AS_OBJECT]]


class _VerifiedFile(NamedTuple):
    """A file that was compared with its sum: what the system said of it, the sum, and the facts that held for it."""

    state: tuple[int, int, int, int]
    sha256: Sha256
    facts: tuple[str, ...] = ()


class _Verified(FileRecord):
    """The files of a folder that were compared with their sums."""

    title = "the list of verified files"
    files: dict[FileName, _VerifiedFile]


class ContentCheck(NamedTuple):
    """A check of a file's content: the fact that it establishes, and a function that raises DamagedFile."""

    fact: str
    run: Callable[[Path], None]


@final
class VerifiedFolder:
    """A folder whose files are compared with the sums of a manifest before they are read.

    Sizes are compared at every access. A sum is computed once for a file, and again only where the size, the times or
    the inode of the file have changed since: the file `.verified.json` remembers them, if the folder can be written.
    """

    def __init__(self, folder: Path, sums: Mapping[str, FileSum]) -> None:
        self.folder = folder
        self.sums = sums

    @classmethod
    def open(cls, folder: Path) -> "VerifiedFolder":
        """The folder with the sums of its manifest. Raises DamagedFile where there is no valid manifest."""
        return cls(folder, Manifest.read(folder / MANIFEST).files)

    @classmethod
    def of(cls, folder: "Path | VerifiedFolder") -> "VerifiedFolder":
        """`open`, and a folder that is open already as it is."""
        if isinstance(folder, VerifiedFolder):
            return folder
        return cls.open(folder)

    def __contains__(self, name: str) -> bool:
        return name in self.sums

    def file(self, name: str, check: ContentCheck | None = None) -> Path:
        """The path of a file that is as it was written, and whose content passes the check. Raises DamagedFile.

        The check runs once for a file and a fact, like the comparison of the sum.
        """
        if name not in self.sums:
            raise DamagedFile(f"{self.folder / name} is missing in the list {self.folder / MANIFEST}")
        self._verify([name], check)
        return self.folder / name

    def verify(self, *, recompute: bool = False) -> None:
        """Compare all files, with `recompute` also those that were compared before. Raises DamagedFile."""
        if recompute:
            # without its memory every sum is computed again
            (self.folder / _MEMORY).unlink(missing_ok=True)
        self._verify(self.sums)

    def find_damage(self) -> str | None:
        """What is wrong with the first damaged file, None if all files are as they were written."""
        try:
            self.verify()
        except DamagedFile as damage:
            return str(damage)
        return None

    def _verify(self, names: Iterable[str], check: ContentCheck | None = None) -> None:
        remembered = self._remembered()
        original = dict(remembered)
        for name in names:
            path = self.folder / name
            expected = self.sums[name]
            current = _VerifiedFile(_file_state(path, expected.size), expected.sha256)
            verified = remembered.get(name, current)
            # a file that looks the same to the system is not read again
            if name not in remembered or verified[:2] != current[:2]:
                _compare_sum(path, expected.sha256)
                verified = current
            if check is not None and check.fact not in verified.facts:
                check.run(path)
                verified = verified._replace(facts=(*verified.facts, check.fact))
            remembered[name] = verified
        if remembered != original:
            # a folder that cannot be written is verified again each time
            with suppress(OSError, UserError):
                _Verified(files=remembered).write(self.folder / _MEMORY)

    def _remembered(self) -> dict[str, _VerifiedFile]:
        # a damaged memory costs one more comparison, nothing else
        with suppress(UserError, OSError):
            return dict(_Verified.read(self.folder / _MEMORY).files)
        return {}


def write_manifest(folder: Path, *, without: Collection[str] = ()) -> None:
    """Write the manifest of all files in a folder and the folders inside, and force them to disk.

    Hidden files and those named in `without` are left out.
    """
    # in the order of names, so that equal folders have equal manifests
    sums: dict[str, FileSum] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(".") and name not in without and name != MANIFEST:
            sums[name] = file_sum(path)
    Manifest(files=sums).write(folder / MANIFEST)
    sync_folder(folder)


def file_sum(path: Path) -> FileSum:
    """The size and the sum of a file, which is forced to disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileSum(os.fstat(file.fileno()).st_size, digest)


def _compare_sum(path: Path, digest: str) -> None:
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != digest:
            raise DamagedFile(f"{path} is damaged: it is not as it was written (its SHA-256 differs)")


def _file_state(path: Path, size: int) -> tuple[int, int, int, int]:
    """What the system says of a file, which no program can restore after a change. Raises DamagedFile by its size."""
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedFile(f"{path} is missing") from None
    if not path.is_file():
        raise DamagedFile(f"{path} is not a file")
    if status.st_size != size:
        raise DamagedFile(f"{path} is damaged: it has {status.st_size:,} bytes instead of {size:,}")
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class UnfinishedWork(FileRecord):
    """What a folder is the unfinished output of; the file goes when it is finished."""

    title = "the mark of an unfinished folder"
    work: str


def check_unfinished(folder: Path, work: str) -> bool:
    """Whether the folder is the unfinished output of this `work`, a phrase that says all that it depends on.

    False where there is no folder, or an empty one. Raises UserError for a folder of anything else: it may be
    finished, and somebody's.
    """
    if not folder.exists() and not folder.is_symlink():
        return False
    mark = folder / MARK
    if mark.is_file():
        recorded_work = UnfinishedWork.read(mark).work
        if recorded_work != work:
            remedy = "choose another folder, or remove this one"
            raise UserError(f"{folder} is the unfinished output of '{recorded_work}', not of '{work}'; {remedy}")
        return True
    # the draft of a mark may be all that a kill has left
    if folder.is_dir() and all(path.match(".*.part") for path in folder.iterdir()):
        return False
    raise UserError(f"{folder} exists already; choose another --out")


@contextmanager
def unfinished_folder(folder: Path, work: str) -> Iterator[None]:
    """Mark the folder, which is made where it is missing, as the unfinished output of `work` until the block succeeds.

    The same work may go on in it after an interruption: what is there already is written again, or used. A block that
    fails before it has written anything leaves nothing.
    """
    is_new = not folder.exists()
    make_folder(folder)
    UnfinishedWork(work=work).write(folder / MARK)
    remove_drafts(folder)
    try:
        yield
    except Exception:
        # an empty folder would look like a result
        if is_new and [path.name for path in folder.iterdir()] == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()
        raise
    with report_not_written(folder):
        (folder / MARK).unlink()
