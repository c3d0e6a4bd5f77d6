"""A number for each token: as a bar a line, and as a picture that goes on below where a text is long."""

from pathlib import Path

import pytest

from manyformer.errors import UserError
from manyformer.view.token_counts import TOKENS_PER_ROW, TokenCounts, describe_counts, draw_counts


def test_every_token_has_a_line_and_a_bar_as_long_as_its_number() -> None:
    assert describe_counts(TokenCounts("", ("a", "dog"), (2, 4), 6)) == "  a ██     2\ndog ████   4"
    assert describe_counts(TokenCounts("", ("a",), (2.5,), 100)) == f"a {'█' * 1:<24} 2.5"


def test_long_texts_go_on_below_and_any_token_can_be_drawn(tmp_path: Path) -> None:
    tokens = ["$x$", "", "␣"] * TOKENS_PER_ROW
    one = TokenCounts("decoder", tuple(tokens), tuple(float(n % 5 + 1) for n in range(len(tokens))), 5.0)
    draw_counts([one, one._replace(title="encoder")], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 1000
    assert len(describe_counts(one).split("\n")) == len(tokens)
    assert one.mean == pytest.approx(3.0)


def test_the_suffix_must_be_that_of_a_picture() -> None:
    with pytest.raises(UserError, match="must end in one of"):
        draw_counts([TokenCounts("", ("a",), (1,), 1)], "a.gif")
