"""The figures of a suite: small panels by family, each with all other cases in gray."""

from pathlib import Path
from typing import Any

import pytest

from manyformer.analysis.comparisons import suite_pictures
from manyformer.analysis.comparisons.suite_pictures import FEW_CASES, SUITE_FIGURES, draw_suite
from manyformer.analysis.comparisons.suite_results import SuiteRecord, read_results
from manyformer.base.files.figures import BACKGROUND_COLOR
from manyformer.config.shipped import SUITE_RESULTS
from manyformer.recipes import RECIPES


@pytest.fixture(scope="module")
def shipped() -> SuiteRecord:
    return read_results(SUITE_RESULTS)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures, which are not written."""
    figures: list[Any] = []
    monkeypatch.setattr(suite_pictures, "write_picture", lambda figure, path: figures.append(figure))
    return figures


def names(axis: Any) -> list[str]:
    return [text.get_text() for text in axis.get_legend().get_texts()]


def test_each_case_stands_once_in_color_and_behind_all_others(
    shipped: SuiteRecord, drawn: list[Any], tmp_path: Path
) -> None:
    (states,) = [figure for figure in SUITE_FIGURES if figure.name == "state.png"]
    assert suite_pictures.draw_figure(shipped, states, tmp_path / "state.png")
    rows = [names(axis) for axis in drawn[0].axes if axis.get_legend()]
    cases = [name for row in rows for name in row]
    with_state = [case for case, costs in shipped.costs.items() if any(cost.state_bytes for cost in costs.lengths)]
    assert sorted(cases) == sorted(with_state)
    for row in rows:
        assert len({RECIPES[shipped.costs[case].recipe].card.family for case in row}) == 1
    for axis in drawn[0].axes:
        colors = [line.get_color() for line in axis.lines]
        assert 0 < colors.count(BACKGROUND_COLOR) < len(with_state)
    # columns have one scale, so that a row can be compared with those above
    columns = len(drawn[0].axes) // len(rows)
    for column in range(columns):
        assert len({axis.get_ylim() for axis in drawn[0].axes[column::columns]}) == 1


def test_few_cases_share_one_row_and_what_was_not_measured_has_no_figure(
    shipped: SuiteRecord, drawn: list[Any], tmp_path: Path
) -> None:
    chosen = list(shipped.costs)[:FEW_CASES]
    tasks = []
    for task in shipped.tasks:
        results = {
            budget: column.model_copy(update={"measured": tuple(m for m in column.measured if m.case in chosen)})
            for budget, column in task.results.items()
        }
        tasks.append(task.model_copy(update={"results": results, "lengths": task.lengths[:1]}))
    few = shipped.model_copy(update={"tasks": tuple(tasks)})
    assert [path.name for path in draw_suite(few, tmp_path)] == ["state.png", "seconds.png"]
    (legend,) = [axis for axis in drawn[0].axes if axis.get_legend()]
    assert names(legend) == chosen
    # without costs there is no state to draw
    bare = few.model_copy(update={"costs": {}})
    assert [path.name for path in draw_suite(bare, tmp_path)] == ["seconds.png"]
