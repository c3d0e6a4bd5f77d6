"""Folders that an interruption left: the same work goes on in them, other work leaves them alone."""

from contextlib import suppress
from pathlib import Path

import pytest

from manyformer.errors import UserError
from manyformer.files.verified_folder import MARK, check_unfinished, unfinished_folder


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
