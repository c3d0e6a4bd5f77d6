"""The checks of shapes see what is wrong, the first time and after much that was right, in all packages named."""

from importlib.util import find_spec
from pathlib import Path

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import manyformer as mf
from manyformer.nn import Attention
from shapes import CHECKED, checked_once


@checked_once
def turned(x: Float[Tensor, "a b"], *, twice: bool = False) -> Float[Tensor, "b a"]:
    return x if twice else x.T


def test_wrong_shapes_are_found_among_right_ones() -> None:
    for _ in range(2):
        assert turned(torch.ones(2, 3)).shape == (3, 2)
        with pytest.raises(jaxtyping.TypeCheckError):
            turned(torch.ones(2, 3, 4))
        with pytest.raises(jaxtyping.TypeCheckError):
            turned(torch.ones(2, 3, dtype=torch.long))
        with pytest.raises(jaxtyping.TypeCheckError):
            turned(torch.ones(2, 3), twice=True)
        with pytest.raises(jaxtyping.TypeCheckError):
            turned(3)  # type: ignore[arg-type]
        assert turned(torch.ones(2, 2), twice=True).shape == (2, 2)


def test_another_output_for_an_input_known_already_is_found() -> None:
    sizes = [3, 3, 4]
    calls = []

    @checked_once
    def grown(x: Float[Tensor, " a"]) -> Float[Tensor, " 3"]:
        calls.append(len(x))
        return x.new_ones(sizes[len(calls) - 1])

    for _ in range(2):
        grown(torch.ones(2))
    with pytest.raises(jaxtyping.TypeCheckError):
        grown(torch.ones(2))
    assert calls == [2, 2, 2], "a function is called once, whatever is checked"


@pytest.mark.parametrize("name", CHECKED)
def test_every_package_named_exists(name: str) -> None:
    """A name left behind by a move would switch its checks off unseen."""
    # not by an earlier path: modules are checked by the name of their file
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert name.replace(".", "/") in Path(spec.origin).as_posix()


def test_the_library_is_checked() -> None:
    attention = next(
        part for part in mf.build("transformer-lm", vocab=11, dim=16, heads=2).modules() if isinstance(part, Attention)
    )
    with pytest.raises(jaxtyping.TypeCheckError, match="x"):
        attention(torch.ones(2, 16), None)
