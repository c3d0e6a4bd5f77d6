"""The style of figures: curves can be told apart by the color-blind and in gray."""

import itertools
from typing import Any

import numpy as np
import pytest

from manyformer.base.files.figures import (
    BACKGROUND_COLOR,
    COLORS,
    QUIET_COLOR,
    add_legend,
    curve_style,
    lighten,
    panels,
)

DEUTERANOPIA = np.array(
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
)
"""Machado, Oliveira and Fernandes 2009, on linear red, green and blue."""

LUMINANCE = np.array([0.2126, 0.7152, 0.0722])


def linear(color: str) -> Any:
    channels = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(first: str, second: str) -> float:
    dark, light = sorted(float(LUMINANCE @ linear(color)) for color in (first, second))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("color", [*COLORS, QUIET_COLOR])
def test_lines_stand_out_from_white_and_from_the_gray_background(color: str) -> None:
    assert contrast(color, "#ffffff") >= 3
    assert contrast(color, "#ffffff") > contrast(BACKGROUND_COLOR, "#ffffff") + 1


@pytest.mark.parametrize("pair", list(itertools.combinations(COLORS, 2)))
def test_colors_stay_apart_for_the_color_blind(pair: tuple[str, str]) -> None:
    first, second = (np.clip(DEUTERANOPIA @ linear(color), 0, 1) ** (1 / 2.2) for color in pair)
    assert np.abs(first - second).max() > 0.15


def test_neighbors_differ_in_gray_too_and_forty_curves_are_all_different() -> None:
    styles = [curve_style(index) for index in range(40)]
    for first, second in itertools.pairwise(styles):
        assert first["linestyle"] != second["linestyle"]
        assert first["marker"] != second["marker"]
        assert first["color"] != second["color"]
    assert len({(style["color"], style["marker"]) for style in styles}) == 40


def test_a_long_curve_has_few_markers_and_neighbors_at_other_points() -> None:
    starts = [curve_style(index, 1000)["markevery"] for index in range(2)]
    assert all(step > 100 for _, step in starts)
    assert starts[0][0] != starts[1][0]


def test_a_lighter_color_lies_between_the_color_and_white() -> None:
    assert lighten("#000000", 0.5) == "#808080"
    assert lighten("#0072b2", 0) == "#0072b2"


def test_a_legend_names_each_label_once_and_adds_its_height() -> None:
    figure, axes = panels(1, 2)
    for axis in axes:
        axis.plot([0, 1], [0, 1], label="a")
    height = figure.get_figheight()
    add_legend(figure)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a"]
    assert figure.get_figheight() > height
