"""Runs that are trained once for all tests of datastores."""

from pathlib import Path

import pytest
from stores import trained


@pytest.fixture(scope="session")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer language model."""
    return trained(tmp_path_factory.mktemp("plain"), "transformer-lm", "dropout=0.1")


@pytest.fixture(scope="session")
def memory_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer-XL whose memory is carried along lanes."""
    return trained(tmp_path_factory.mktemp("memory"), "transformer-xl", "memory_length=16", "data.packing=contiguous")
