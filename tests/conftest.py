"""What all tests share: one thread, a fixed seed, and shapes checked at run time."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch

CHECKED = [
    f"manyformer.{part}"
    for part in (
        *("core", "masks", "position", "kernels", "sources", "ops", "attention", "feedforward", "mixers", "models"),
        "depth",
        *("generate.beam", "generate.feeds", "generate.sampling"),
    )
]
"""Packages whose shape annotations are checked at every call while the tests run."""

# the library is imported by test modules, which pytest collects after this file
_hook = jaxtyping.install_import_hook(CHECKED, "shapes.once")

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
