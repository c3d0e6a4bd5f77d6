"""The one writer: whole files or none, with the user's rights, and the name of what cannot be written.

Drafts of killed processes are removed by the next one that writes the same file, those of living ones are not.
"""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from manyformer.base.files.atomic_files import (
    DiskFull,
    NotWritable,
    append_bytes,
    atomic_path,
    atomic_write_text,
    draft_path,
    report_not_written,
    reserve_file,
)


def test_drafts_of_ended_processes_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "table[1].md"
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    abandoned = tmp_path / f".{path.name}.{ended.pid}.part"
    in_use = tmp_path / f".{path.name}.{os.getppid()}.part"
    of_another_file = tmp_path / f".other.{ended.pid}.part"
    for draft in (abandoned, in_use, of_another_file):
        draft.write_text("half")
    atomic_write_text(path, "all of it")
    assert path.read_text() == "all of it"
    assert sorted(tmp_path.iterdir()) == sorted([path, in_use, of_another_file])


def test_folders_are_removed_too(tmp_path: Path) -> None:
    abandoned = tmp_path / f".model.{2**40}.part"
    (abandoned / "inside").mkdir(parents=True)
    assert draft_path(tmp_path / "model") == tmp_path / f".model.{os.getpid()}.part"
    assert not abandoned.exists()


@pytest.mark.parametrize(
    ("number", "kind", "reason"),
    [
        (errno.ENOSPC, DiskFull, "the disk is full"),
        (errno.EDQUOT, DiskFull, "the disk quota is used up"),
        (errno.EROFS, NotWritable, "the disk is read-only"),
        (errno.EACCES, NotWritable, "permission is denied"),
        (errno.EXDEV, NotWritable, "it lies on another disk"),
        (errno.ETXTBSY, NotWritable, "Text file busy"),
    ],
)
def test_whatever_prevents_a_file_is_told_with_its_name(number: int, kind: type[NotWritable], reason: str) -> None:
    """Also where a library tells the error of the system as text, as safetensors does."""
    for error in (OSError(number, os.strerror(number)), SafetensorError(f"I/O error: ... (os error {number})")):
        with pytest.raises(NotWritable) as caught, report_not_written(Path("there/model.safetensors")):
            raise error
        assert type(caught.value) is kind
        assert str(caught.value).endswith(": there/model.safetensors could not be written")
        if isinstance(error, OSError) or number != errno.ETXTBSY:
            assert caught.value.reason == reason


def test_an_old_file_stays_whole_where_the_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.md"
    atomic_write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("manyformer.base.files.atomic_files.os.fsync", full)
    with pytest.raises(DiskFull, match=r"table\.md could not be written"):
        atomic_write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_libraries_get_the_rights_of_the_mask(tmp_path: Path) -> None:
    """A library may write a private file of its own and move it over the draft."""
    before = os.umask(0o027)
    try:
        with atomic_path(tmp_path / "weights") as draft:
            private = tmp_path / "private"
            private.touch(0o600)
            private.replace(draft)
    finally:
        os.umask(before)
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o640


def test_a_row_that_a_full_disk_cuts_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    append_bytes(path, b"one\ntw")
    append_bytes(path, b"two\n", drop=2)
    assert path.read_bytes() == b"one\ntwo\n"
    code = (
        "import resource, sys; from pathlib import Path; from manyformer.base.files.atomic_files import append_bytes; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10)); append_bytes(Path(sys.argv[1]), b'three\\n')"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert "the file would be too large: " in ended.stderr
    assert path.read_bytes() == b"one\ntwo\n"


def test_a_file_that_is_mapped_has_its_room(tmp_path: Path) -> None:
    reserve_file(tmp_path / "keys", 10_000)
    reserve_file(tmp_path / "none", 0)
    status = (tmp_path / "keys").stat()
    assert status.st_size == 10_000
    assert status.st_blocks * 512 >= 10_000
    assert (tmp_path / "none").stat().st_size == 0
