"""What commands write: with the user's rights, whole, named when it cannot be written, and finished after a kill."""

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import Cli

from full_disk import no_file_longer_than
from manyformer.base.files.verified_folder import MARK

Command = Callable[[Path, Path], tuple[str, ...]]
"""The words of a command for a run and the folder or file that it writes."""

COMMANDS: dict[str, Command] = {
    "convert": lambda run, out: ("convert", str(run), "window=16", "--out", str(out / "new")),
    "export": lambda run, out: ("export", str(run), "--out", str(out / "new")),
    "prune": lambda run, out: ("prune", str(run), "--keep", "1", "--how", "importance", "--out", str(out / "new")),
    "plot": lambda run, out: ("plot", str(run), "--out", str(out / "new" / "curves.png")),
    "view": lambda run, out: ("view", str(run), "the cat", "--out", str(out / "new" / "page.html")),
    "heads": lambda run, out: ("heads", str(run), "--sentences", "2", "--out", str(out / "new" / "heads.svg")),
    "datastore": lambda run, out: ("datastore", "build", str(run), "--split", "valid", "--out", str(out / "new")),
    "runs copy": lambda run, out: ("runs", "copy", "lm/stdlib", str(out / "new" / "run.yaml")),
}


@pytest.fixture
def here(text_run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run, in the folder that the paths of its data are relative to."""
    monkeypatch.chdir(text_run.parent.parent)
    return text_run


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("mask", [0o022, 0o027])
@pytest.mark.parametrize("name", ["convert", "export", "prune", "plot", "datastore"])
def test_files_have_the_rights_that_the_mask_leaves(cli: Cli, here: Path, tmp_path: Path, name: str, mask: int) -> None:
    """Weights, too: their library writes files that their owner alone can read."""
    with umask(mask):
        ended = cli(*COMMANDS[name](here, tmp_path))
    assert ended.code == 0, ended.err
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert files
    rights = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in files}
    assert rights == dict.fromkeys(rights, oct(0o666 & ~mask))


def test_all_files_of_a_run_have_these_rights(text_run: Path) -> None:
    before = os.umask(0)
    os.umask(before)
    rights = {path.name: stat.S_IMODE(path.stat().st_mode) for path in text_run.rglob("*.safetensors")}
    assert rights == dict.fromkeys(("model.safetensors", "optimizer.safetensors"), 0o666 & ~before)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_full_disk_is_reported_with_what_could_not_be_written(
    cli: Cli, here: Path, tmp_path: Path, name: str
) -> None:
    words = COMMANDS[name](here, tmp_path)
    with no_file_longer_than(100):
        ended = cli(*words)
    assert ended.code == 2, ended
    assert "the file would be too large" in ended.err
    assert f"{tmp_path / 'new'}" in ended.err
    assert "could not be written" in ended.err
    # with room again
    ended = cli(*words)
    assert ended.code == 0, ended.err
    assert not [path for path in tmp_path.rglob("*") if path.name.endswith(".part") or path.name == MARK]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_same_command_finishes_what_a_kill_left_at_any_write(
    cli: Cli, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The n-th file is the last that is written, then the process ends, for each n."""
    sync = os.fsync
    undisturbed = COMMANDS[name](here, tmp_path / "undisturbed")
    assert cli(*undisturbed).code == 0
    for number in range(1, 50):
        out = tmp_path / str(number)
        words, synced = COMMANDS[name](here, out), 0

        def end_at(handle: int, last: int = number) -> None:
            nonlocal synced
            synced += 1
            if synced == last:
                raise KeyboardInterrupt
            sync(handle)

        with monkeypatch.context() as patch:
            patch.setattr("manyformer.base.files.atomic_files.os.fsync", end_at)
            first = cli(*words)
        if synced < number:
            break
        assert first.code == 130, first.err
        # all that may be missing is the last word: a folder that is complete is not written again
        is_complete = names_of(out) == names_of(tmp_path / "undisturbed")
        again = cli(*words)
        assert again.code == 0 or (is_complete and "exists already" in again.err), again.err
        assert names_of(out) == names_of(tmp_path / "undisturbed")
    assert number > 1


def names_of(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.name.startswith(".verified")}


def test_the_finished_output_of_somebody_else_stays(cli: Cli, here: Path, tmp_path: Path) -> None:
    for name in ("convert", "export", "prune"):
        out = tmp_path / name
        (out / "new").mkdir(parents=True)
        (out / "new" / "mine.txt").write_text("mine")
        ended = cli(*COMMANDS[name](here, out))
        assert ended.code == 2
        assert "exists already; choose another --out" in ended.err
        assert [path.name for path in (out / "new").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("out", "reason"),
    [
        ("file/curves.png", "a part of the path is a file, not a folder"),
        (f"{'x' * 300}.png", "the name is too long"),
        ("folder.png", "there is a folder of that name"),
        ("pipe.png", "there is a device or pipe of that name"),
        ("loop/curves.png", "the links of the path lead in a circle"),
    ],
)
def test_places_that_take_no_file_are_named(cli: Cli, here: Path, tmp_path: Path, out: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.png").mkdir()
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    ended = cli("plot", str(here), "--out", str(tmp_path / out))
    assert ended.code == 2
    assert ended.err.startswith(f"error: {reason}: "), ended.err
    assert str((tmp_path / out).parent if "/" in out else tmp_path / out) in ended.err
    assert (tmp_path / "pipe.png").is_fifo()


def test_an_upload_that_failed_is_tried_again(
    cli: Cli, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported folder is there then, which the same command must not refuse."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    uploads: list[dict[str, object]] = []

    class Hub:
        def create_repo(self, **_: object) -> str:
            return "https://hub/me/model"

        def upload_folder(self, **options: object) -> None:
            uploads.append(options)
            if len(uploads) == 1:
                raise ConnectionError("the line is cut")

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    words = ("export", str(here), "--out", str(tmp_path / "new"), "--push", "me/model")
    ended = cli(*words)
    assert ended.code == 2
    assert "the line is cut; the same command tries it again" in ended.err
    other = cli(*words[:-1], "me/other")
    assert (other.code, "is the unfinished output of" in other.err) == (2, True)
    ended = cli(*words)
    assert ended.code == 0, ended.err
    assert "going on with" in ended.err
    assert uploads[1]["ignore_patterns"] == [MARK]
    assert not (tmp_path / "new" / MARK).exists()
    assert cli(*words).code == 2
