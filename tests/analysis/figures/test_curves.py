"""Pictures of training runs: what is in them, and what is said where there is nothing to draw."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from manyformer.analysis.figures import curves, plot_runs
from manyformer.base.errors import UserError


def run_folder(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    lines = (json.dumps({"tokens": 0, "seconds": 0.0, **row}) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def rows(scale: float, *, bits: bool = True) -> list[dict[str, Any]]:
    actual: list[dict[str, Any]] = []
    for step in range(10, 60, 10):
        row = {"step": step, "loss": scale / step, "learning_rate": 1e-3 * step, "gradient_norm": 1.0}
        if step % 20 == 0:
            row |= {"valid_loss": 2 * scale / step, "valid_accuracy": 0.5}
            row |= {"valid_bits_per_byte": 3 * scale / step} if bits else {}
        actual.append(row)
    return actual


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were written."""
    figures: list[Any] = []
    write = curves.write_picture
    monkeypatch.setattr(curves, "write_picture", lambda figure, path: (figures.append(figure), write(figure, path)))
    return figures


def lines(axis: Any) -> dict[str, list[tuple[float, float]]]:
    return {line.get_label(): list(zip(*line.get_data())) for line in axis.lines}


def test_all_metrics_of_all_runs_are_drawn(tmp_path: Path, drawn: list[Any]) -> None:
    runs = [run_folder(tmp_path / name, rows(scale)) for name, scale in (("one", 1.0), ("two", 4.0))]
    plot_runs(runs, tmp_path / "curves.png")
    losses, valid, rate, norm = (lines(axis) for axis in drawn[0].axes)
    assert set(losses) == {f"{run}, {kind}" for run in ("one", "two") for kind in ("training", "validation")}
    assert losses["two, training"] == [(step, 4 / step) for step in range(10, 60, 10)]
    assert losses["two, validation"] == [(20, 0.4), (40, 0.2)]
    assert valid["one"] == [(20, 0.15), (40, 0.075)]
    assert set(rate) == set(norm) == {"one", "two"}
    assert [axis.get_xlabel() for axis in drawn[0].axes] == ["step"] * 4


def test_without_bits_accuracy_is_drawn(tmp_path: Path, drawn: list[Any]) -> None:
    plot_runs([run_folder(tmp_path / "run", rows(1.0, bits=False))], tmp_path / "curves.png")
    assert lines(drawn[0].axes[1])["run"] == [(20, 0.5), (40, 0.5)]
    assert drawn[0].axes[1].get_ylabel() == "validation: accuracy"
    assert set(lines(drawn[0].axes[0])) == {"training", "validation"}


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("deep/a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_the_ending_decides_the_format(tmp_path: Path, name: str, start: bytes) -> None:
    run = run_folder(tmp_path / "run", rows(1.0))
    plot_runs([run], tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)
    assert len(os.listdir((tmp_path / name).parent)) <= 2


def test_runs_without_metrics_and_unknown_formats_are_not_drawn(tmp_path: Path) -> None:
    empty, cut = run_folder(tmp_path / "empty", []), run_folder(tmp_path / "cut", rows(1.0))
    (cut / "metrics.jsonl").write_text('{"step": 1, "lo')
    for folder in (empty, cut):
        with pytest.raises(UserError, match=r"metrics\.jsonl has no metrics yet: train the run for some steps"):
            plot_runs([folder], tmp_path / "a.png")
    with pytest.raises(UserError, match=r"holds no run: metrics\.jsonl is missing"):
        plot_runs([tmp_path], tmp_path / "a.png")
    with pytest.raises(UserError, match=r"a\.gif must end in one of \.png, \.svg, \.pdf"):
        plot_runs([empty], tmp_path / "a.gif")
    with pytest.raises(UserError, match="there is no run to draw"):
        plot_runs([], tmp_path / "a.png")
    assert not (tmp_path / "a.png").exists()


def test_a_picture_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    def full(self: Figure, file: BinaryIO, **_: Any) -> None:
        file.write(b"half")
        raise OSError("No space left on device")

    run = run_folder(tmp_path / "run", rows(1.0))
    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(OSError, match="No space left"):
        plot_runs([run], tmp_path / "a.png")
    assert os.listdir(tmp_path) == ["run"]
