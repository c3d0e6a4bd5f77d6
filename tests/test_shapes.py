"""The checks of shapes see what is wrong, the first time and after much that was right."""

import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from shapes import once


@jaxtyping.jaxtyped(typechecker=once)
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
