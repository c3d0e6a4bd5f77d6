"""The bytes of caches in the documentation are those that states hold after a prompt."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.nn.core import State, tree_map

PAGE = Path(__file__).parents[3] / "docs/decoding.md"
ROWS: list[tuple[str, str, str]] = re.findall(
    r"^\| `([^`]+)` \| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE
)
SIZES = {"vocab": 261, "dim": 64, "depth": 2, "heads": 4}


def bytes_of(state: State) -> int:
    """The bytes of all tensors of a state."""
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    tree_map(collect, state)
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(("recipe", "at_256", "at_1024"), ROWS)
def test_documented_bytes_of_a_cache(recipe: str, at_256: str, at_1024: str) -> None:
    name, *words = shlex.split(recipe)
    keywords = {key: int(value) for key, value in (word.split("=") for word in words)}
    model: Any = mf.build(name, **SIZES, **keywords).eval()
    for length, documented in ((256, at_256), (1024, at_1024)):
        with torch.no_grad():
            state = model(torch.zeros(1, length, dtype=torch.long), None, model.init_state(1)).state
        assert f"{bytes_of(state):,}" == documented, length
