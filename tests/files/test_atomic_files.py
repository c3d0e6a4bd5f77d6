"""Drafts of killed processes are removed by the next one that writes the same file, those of living ones are not."""

import os
import subprocess
import sys
from pathlib import Path

from manyformer.files.atomic_files import atomic_write_text, draft_path


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
