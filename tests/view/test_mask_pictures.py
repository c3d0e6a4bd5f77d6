"""Pictures of masks: the text says what is visible, and a file is written where one is asked for."""

from pathlib import Path

import pytest

import manyformer as mf
from manyformer import masks as m
from manyformer.errors import UserError
from manyformer.view import attention_masks


def test_small_masks_are_drawn_pair_by_pair() -> None:
    assert mf.draw(m.Causal(), 3).split() == ["█··", "██·", "███"]
    assert mf.draw(m.Window(2) | m.VisibleToAll(m.FirstTokens(1)), 4).split() == ["█···", "██··", "███·", "█·██"]
    assert mf.draw(m.Local2D(4, 1, 2, 1, 1), 6).split() == ["█·····", "██····", "·██···", "·███··", "███·█·", "███·██"]


def test_heads_that_differ_stand_apart() -> None:
    text = mf.draw(m.PerHead({1: m.Window(1)}, default=m.Causal()), 2, heads=3)
    assert text == "heads 0, 2\n█·\n██\n\nheads 1\n█·\n·█"
    assert mf.draw(m.Causal(), 2, heads=8) == "█·\n██"


def test_long_masks_are_shaded() -> None:
    rows = mf.draw(m.Causal(), 640).split()
    assert len(rows) == len(rows[0]) == 64
    assert rows[1][:3] == "█▒·"
    # a single visible pair is never drawn as nothing, a single hidden one never as all
    assert mf.draw(m.AttendsToAll(m.AtPositions(0)) & m.VisibleToAll(m.AtPositions(0)), 640).split()[0][0] == "░"
    assert mf.draw(~(m.AttendsToAll(m.AtPositions(0)) & m.VisibleToAll(m.AtPositions(0))), 640).split()[0][0] == "▓"


def test_a_picture_is_written(tmp_path: Path) -> None:
    for name in ("one.png", "two.svg"):
        mf.draw(m.union(m.strided_pattern(4)), 16, path=tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(UserError, match="must end in one of"):
        mf.draw(m.Causal(), 4, path=tmp_path / "mask.txt")
    with pytest.raises(UserError, match="length \\(9999\\)"):
        mf.draw(m.Causal(), 9999)


def test_the_masks_of_a_model() -> None:
    model = mf.build("longformer-lm", dim=16, heads=2, depth=4, window=4, top_window=4, dilated_heads=1)
    actual = attention_masks(model)
    assert next(iter(actual)) == m.Window(4)
    assert actual[m.Window(4)] == ["body.0.attention.inner.kernel", "body.1.attention.inner.kernel"]
    assert m.PerHead({0: m.Window(4, dilation=2)}, default=m.Window(4)) in actual
