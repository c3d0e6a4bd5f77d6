"""Rows of metrics survive a kill and damage: what is lost is named, what is not is retained."""

from pathlib import Path

import pytest

from manyformer.base.files.atomic_files import NotWritable
from manyformer.base.files.json_records import DamagedFile
from manyformer.training.metrics import MetricsFiles, extend_sum, read_rows


def write(folder: Path, rows: int) -> None:
    files = MetricsFiles(folder, rows=0, log=pytest.fail)
    for step in range(1, rows + 1):
        files.add({"step": step, "tokens": 10 * step, "seconds": 0.5, "loss": 1 / step})


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder / "metrics.jsonl")]


def test_rows_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    write(tmp_path, 5)
    MetricsFiles(tmp_path, rows=3, log=pytest.fail)
    assert steps(tmp_path) == [1, 2, 3]
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4


def test_a_row_that_a_kill_has_truncated_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, 5)
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    assert steps(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "damage", [b"garbage\n", b'{"step": 2, "tokens": 20}\n', b'{"step": "2"}\n', b"\xff\n", b"7\n"]
)
def test_a_damaged_row_is_set_aside_and_later_ones_are_retained(damage: bytes, tmp_path: Path) -> None:
    write(tmp_path, 5)
    file = tmp_path / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([lines[0], damage, *lines[2:]]))
    with pytest.raises(DamagedFile, match=r"metrics\.jsonl:2 is damaged: .*sets such rows aside"):
        steps(tmp_path)
    notes: list[str] = []
    MetricsFiles(tmp_path, rows=5, log=notes.append)
    assert steps(tmp_path) == [1, 3, 4, 5]
    assert len(notes) == 1
    assert f"{file}:2 is damaged: " in notes[0]
    assert (tmp_path / "metrics.damaged").read_bytes() == damage


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, 5)
    rows_sum = ""
    for row in read_rows(tmp_path / "metrics.jsonl"):
        rows_sum = extend_sum(rows_sum, row)
    MetricsFiles(tmp_path, rows=5, rows_sum=rows_sum, log=pytest.fail)
    file = tmp_path / "metrics.jsonl"
    file.write_text(file.read_text().replace('"tokens": 20', '"tokens": 21'))
    notes: list[str] = []
    MetricsFiles(tmp_path, rows=5, rows_sum=rows_sum, log=notes.append)
    assert notes == [f"{file} is not as it was written: a number in its first 5 rows differs"]


def test_missing_rows_are_counted(tmp_path: Path) -> None:
    write(tmp_path, 5)
    notes: list[str] = []
    MetricsFiles(tmp_path, rows=8, log=notes.append)
    assert notes == [f"{tmp_path / 'metrics.jsonl'} has 5 rows, 8 were written: 3 are missing"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "metrics.csv"])
def test_a_file_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(NotWritable, match=rf"device or pipe of that name: \S+/{name} could not be written"):
        MetricsFiles(tmp_path, rows=0, log=pytest.fail)
