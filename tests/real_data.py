"""Where tests find real data, which the project never contains."""

import os
from pathlib import Path

import pytest


def shared_data(*parts: str) -> Path:
    """A file or folder of the real data, or skip: found through MANYFORMER_DATA or beside the checkout."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("MANYFORMER_DATA", beside))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"real data is not at hand: {path} is missing (set MANYFORMER_DATA to the folder that has it)")
    return path
