"""A number for each token: as a bar a line, and as a picture that goes on below where a text is long."""

from pathlib import Path

import pytest

from manyformer.errors import UserError
from manyformer.view.token_counts import TOKENS_PER_ROW, TokenCounts, describe_counts, draw_counts, draw_steps


def test_every_token_has_a_line_and_a_bar_as_long_as_its_number() -> None:
    assert draw_steps(["a", "dog"], [2, 4], maximum=6) == "  a ██     2\ndog ████   4"
    assert draw_steps(["a"], [2.5], maximum=100) == f"a {'█' * 1:<24} 2.5"


def test_long_texts_go_on_below_and_any_token_can_be_drawn(tmp_path: Path) -> None:
    tokens = ["$x$", "", "␣"] * TOKENS_PER_ROW
    one = TokenCounts("decoder", tuple(tokens), tuple(float(n % 5 + 1) for n in range(len(tokens))), 5.0)
    draw_counts([one, one._replace(title="encoder")], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 1000
    assert len(describe_counts(one).split("\n")) == len(tokens)
    assert one.mean == pytest.approx(3.0)


def test_tokens_and_numbers_must_be_as_many() -> None:
    with pytest.raises(UserError, match="2 tokens and 1 numbers"):
        draw_steps(["a", "b"], [1])
    with pytest.raises(UserError, match="must end in one of"):
        draw_steps(["a"], [1], path="a.gif")
