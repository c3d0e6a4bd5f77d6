"""Folders of several files that are written one after the other: marked until the last one is there."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manyformer.errors import UserError
from manyformer.files.atomic_files import make_folder, remove_drafts, report_not_written
from manyformer.files.json_records import FileRecord

MARK = ".unfinished.json"


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
        found = UnfinishedWork.read(mark).work
        if found != work:
            remedy = "choose another folder, or remove this one"
            raise UserError(f"{folder} is the unfinished output of '{found}', not of '{work}'; {remedy}")
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
    made = not folder.exists()
    make_folder(folder)
    UnfinishedWork(work=work).write(folder / MARK)
    remove_drafts(folder)
    try:
        yield
    except Exception:
        if made and [path.name for path in folder.iterdir()] == [MARK]:
            (folder / MARK).unlink()
            folder.rmdir()
        raise
    with report_not_written(folder):
        (folder / MARK).unlink()
