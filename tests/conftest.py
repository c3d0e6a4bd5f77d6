"""What all tests share: one thread, a fixed seed, shapes checked at run time, and where real data is found."""

import os
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

CHECKED = [
    f"manyformer.{part}"
    for part in (
        *("core", "masks", "position", "kernels", "sources", "ops", "attention", "feedforward", "models"),
        *("generate.beam", "generate.feeds", "generate.sampling"),
    )
]
"""Packages whose shape annotations are checked at every call while the tests run."""

# the library is imported by test modules, which pytest collects after this file
_hook = jaxtyping.install_import_hook(CHECKED, "beartype.beartype")

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Every test draws the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """No shape checks for a test that traces the library with `torch.compile`: their bookkeeping cannot be traced."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def shared_data(*parts: str) -> Path:
    """A file or folder of the real data, or skip: found through MANYFORMER_DATA or beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("MANYFORMER_DATA", beside))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"real data is not at hand: {path} is missing (set MANYFORMER_DATA to the folder that has it)")
    return path
