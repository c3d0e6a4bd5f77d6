"""Files are compared with their sums before they are read, and again when they change; unfinished folders stay."""

import hashlib
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import manyformer as mf
from editing import edit_record
from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.base.files.verified_folder import (
    MARK,
    ContentCheck,
    Manifest,
    VerifiedFolder,
    check_unfinished,
    unfinished_folder,
    write_manifest,
)
from manyformer.data.tokenizers.native_tokenizers import ByteTokenizer
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.models.model_files import replacement_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "part").mkdir()
    (tmp_path / "a.bin").write_bytes(b"abc")
    (tmp_path / "part/b.bin").write_bytes(bytes(1000))
    (tmp_path / "README.md").write_text("for people")
    write_manifest(tmp_path, without=("README.md",))
    return tmp_path


def test_the_manifest_lists_sizes_and_sums(folder: Path) -> None:
    files = json.loads((folder / "manifest.json").read_text())["files"]
    assert files == {
        "a.bin": {"size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()},
        "part/b.bin": {"size": 1000, "sha256": hashlib.sha256(bytes(1000)).hexdigest()},
    }
    assert VerifiedFolder.open(folder).file("part/b.bin").read_bytes() == bytes(1000)


@pytest.mark.parametrize("position", [0, 7999])
def test_every_flipped_bit_is_named(position: int, folder: Path) -> None:
    content = bytearray(1000)
    content[position // 8] ^= 1 << position % 8
    VerifiedFolder.open(folder).verify()
    (folder / "part/b.bin").write_bytes(content)
    with pytest.raises(DamagedFile, match=r"part/b\.bin is damaged: it is not as it was written"):
        VerifiedFolder.open(folder).verify()
    assert VerifiedFolder.open(folder).file("a.bin").read_bytes() == b"abc"


def test_what_is_not_in_the_manifest_is_not_read(folder: Path) -> None:
    (folder / "c.bin").write_bytes(b"")
    files = VerifiedFolder.open(folder)
    assert "c.bin" not in files
    with pytest.raises(DamagedFile, match=r"c\.bin is missing in the list"):
        files.file("c.bin")


def test_a_sum_is_computed_once_for_a_file_that_does_not_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[str] = []
    digest = hashlib.file_digest

    def count(file: object, name: str) -> object:
        computed.append(Path(file.name).name)  # type: ignore[attr-defined]
        return digest(file, name)  # type: ignore[arg-type]

    monkeypatch.setattr(hashlib, "file_digest", count)
    for _ in range(3):
        VerifiedFolder.open(folder).verify()
    assert sorted(computed) == ["a.bin", "b.bin"]
    VerifiedFolder.open(folder).verify(recompute=True)
    assert len(computed) == 4
    # equal content and equal times, but another file
    times = (folder / "a.bin").stat()
    (folder / "a.bin").write_bytes(b"xyz")
    os.utime(folder / "a.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DamagedFile, match=r"a\.bin is damaged"):
        VerifiedFolder.open(folder).verify()


def test_a_damaged_memory_of_sums_is_ignored_and_written_anew(folder: Path) -> None:
    VerifiedFolder.open(folder).verify()
    memory = folder / ".verified.json"
    complete = memory.read_bytes()
    memory.write_text("{")
    VerifiedFolder.open(folder).verify()
    assert memory.read_bytes() == complete
    # it vouches for no content: a damaged file beside a damaged memory is found
    memory.write_text("{")
    (folder / "a.bin").write_bytes(b"xyz")
    with pytest.raises(DamagedFile, match=r"a\.bin is damaged"):
        VerifiedFolder.open(folder).verify()


def test_content_is_checked_with_the_sum(folder: Path) -> None:
    checked: list[Path] = []
    for fact in ("letters", "letters", "three"):
        VerifiedFolder.open(folder).file("a.bin", ContentCheck(fact, checked.append))
    assert checked == [folder / "a.bin"] * 2


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "part/../../outside"])
def test_names_that_lead_out_of_the_folder_are_refused(name: str, folder: Path) -> None:
    file_sum = {"size": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    edit_record(folder / "manifest.json", lambda content: content["files"].update({name: file_sum}))
    with pytest.raises(DamagedFile, match=r"manifest\.json is damaged: files\..* the name of a file inside the folder"):
        VerifiedFolder.open(folder)


def test_missing_files_and_folders_in_their_place(folder: Path) -> None:
    (folder / "a.bin").unlink()
    with pytest.raises(DamagedFile, match=r"a\.bin is missing"):
        VerifiedFolder.open(folder).file("a.bin")
    (folder / "a.bin").mkdir()
    with pytest.raises(DamagedFile, match=r"a\.bin is not a file"):
        VerifiedFolder.open(folder).file("a.bin")


def test_a_saved_model_is_loaded_with_one_reading_of_its_manifest(tmp_path: Path, monkeypatch: Any) -> None:
    model = mf.build("transformer-lm", vocab=ByteTokenizer().vocab, dim=8, depth=1, heads=2)
    with replacement_folder(tmp_path / "model") as draft:
        TokenizerPair(ByteTokenizer(), ByteTokenizer()).save(draft)
        model.write_files(draft)
    read, names = Manifest.read.__func__, list[str]()
    monkeypatch.setattr(Manifest, "read", classmethod(lambda cls, file: names.append(file.name) or read(cls, file)))
    assert mf.load(tmp_path / "model").tokenizer is not None
    assert names == ["manifest.json"]


def interrupt(folder: Path, work: str) -> None:
    with suppress(KeyboardInterrupt), unfinished_folder(folder, work):
        (folder / "first").write_text("1")
        raise KeyboardInterrupt


def test_the_same_work_goes_on_and_takes_the_mark_away(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert not check_unfinished(folder, "prune a")
    interrupt(folder, "prune a")
    assert check_unfinished(folder, "prune a")
    with unfinished_folder(folder, "prune a"):
        assert (folder / "first").read_text() == "1"
    assert sorted(path.name for path in folder.iterdir()) == ["first"]


def test_other_work_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    interrupt(folder, "prune a")
    with pytest.raises(UserError, match=r"out is the unfinished output of 'prune a', not of 'prune b'; choose another"):
        check_unfinished(folder, "prune b")
    assert (folder / "first").read_text() == "1"


def test_a_finished_folder_is_never_taken_for_an_unfinished_one(tmp_path: Path) -> None:
    (tmp_path / "somebodys.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already; choose another --out"):
        check_unfinished(tmp_path, "prune a")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="exists already"):
        check_unfinished(tmp_path / "file", "prune a")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="exists already"):
        check_unfinished(tmp_path / "link", "prune a")


def test_a_draft_of_the_mark_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".{MARK}.{2**40}.part").write_text("{")
    assert not check_unfinished(tmp_path, "prune a")
    with unfinished_folder(tmp_path, "prune a"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_work_that_fails_before_it_writes_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no data"), unfinished_folder(tmp_path / "out", "prune a"):
        raise UserError("no data")
    assert not (tmp_path / "out").exists()
