"""Pictures of training runs: what is in them, and what is said where there is nothing to draw."""

import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from manyformer.analysis.figures import curves, plot_runs
from manyformer.base.errors import UserError
from manyformer.base.files.figures import BACKGROUND_COLOR


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


def test_training_and_validation_differ_in_color_and_in_line_style(tmp_path: Path, drawn: list[Any]) -> None:
    one = run_folder(tmp_path / "one", rows(1.0))
    two = run_folder(tmp_path / "two", rows(2.0))
    for runs in ([one], [one, two]):
        plot_runs(runs, tmp_path / "curves.png")
    for figure in drawn:
        styles = {(line.get_color(), line.get_linestyle()) for line in figure.axes[0].lines}
        pairs = list(zip(figure.axes[0].lines[::2], figure.axes[0].lines[1::2], strict=True))
        assert len(styles) == 2 * len(pairs)
        for training, validation in pairs:
            assert training.get_color() != validation.get_color()
            assert (training.get_linestyle(), validation.get_linestyle()) == ("-", "--")


def test_no_panel_has_a_single_dot_or_none(tmp_path: Path, drawn: list[Any]) -> None:
    several = rows(1.0)
    short = [several[0], {"step": 10, "valid_loss": 0.3, "valid_bits_per_byte": 0.2}]
    once = [*several[:1], several[2], {"step": 50, "valid_loss": 0.3, "valid_bits_per_byte": 0.2}]
    runs = {"short": short, "once": once, "bare": several[:1]}
    folders = {name: run_folder(tmp_path / name, metrics) for name, metrics in runs.items()}
    for chosen in (["short"], ["once"], ["short", "once"], ["short", "bare"]):
        plot_runs([folders[name] for name in chosen], tmp_path / "curves.png")
        for axis in drawn[-1].axes:
            assert sum(len(line.get_xdata()) for line in axis.lines) > 1, chosen
    # what has no panel of its own is told
    plot_runs([folders["short"]], tmp_path / "curves.png")
    assert "validation: bits per byte 0.2 at step 10" in drawn[-1].get_suptitle().replace("\n", " ")
    # a loss alone is shown with its value
    plot_runs([folders["bare"]], tmp_path / "curves.png")
    assert [text.get_text() for text in drawn[-1].axes[0].texts] == ["0.1"]


def test_the_legend_of_many_runs_covers_no_panel_and_names_each(tmp_path: Path, drawn: list[Any]) -> None:
    runs = [run_folder(tmp_path / f"run-{number}", rows(1.0 + number)) for number in range(24)]
    plot_runs(runs, tmp_path / "curves.png")
    (legend,) = drawn[0].legends
    assert {text.get_text() for text in legend.get_texts()} == {run.name for run in runs} | {"training", "validation"}
    assert not any(axis.get_legend() for axis in drawn[0].axes)
    box = legend.get_window_extent()
    assert not any(axis.get_tightbbox().overlaps(box) for axis in drawn[0].axes)


def test_references_stand_in_gray_behind_the_run(tmp_path: Path, drawn: list[Any]) -> None:
    reference = curves.RunCurves("shipped", [{"step": 10, "loss": 3.0}, {"step": 50, "loss": 2.0}])
    plot_runs([run_folder(tmp_path / "run", rows(1.0))], tmp_path / "curves.png", references=[reference])
    behind = min(drawn[0].axes[0].lines, key=lambda line: line.get_zorder())
    assert list(behind.get_ydata()) == [3.0, 2.0]
    assert behind.get_color() == BACKGROUND_COLOR
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["training", "validation", "shipped"]


def test_a_column_of_a_page_has_its_panels_below_each_other(tmp_path: Path, drawn: list[Any]) -> None:
    plot_runs([run_folder(tmp_path / "run", rows(1.0))], tmp_path / "column.pdf", width=3.4)
    assert drawn[0].get_figwidth() == 3.4
    assert len({round(axis.get_position().x1, 2) for axis in drawn[0].axes}) == 1
    # fonts that a publisher can read, not outlines of bitmaps
    assert b"/Type3" not in (tmp_path / "column.pdf").read_bytes()


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
