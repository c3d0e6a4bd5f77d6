"""collaborate: a trained model's heads made to share dimensions."""

import json
from pathlib import Path

import pytest
import torch
from commands import Cli

import manyformer as mf


def test_collaborate_writes_a_model_that_reads_and_writes_text(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    model = mf.load(text_run)
    dim, out = model.spec.keywords["dim"], tmp_path / "same"
    told = cli("collaborate", str(text_run), "--shared", str(dim), "--out", str(out), "--json")
    assert told.code == 0, told.err
    assert set(json.loads(told.out)["errors"].values()) == {0.0}
    found, tokens = mf.load(out), torch.arange(5, 12)[None]
    assert found.spec.recipe == "collaborative"
    torch.testing.assert_close(found(tokens).logits, model(tokens).logits, atol=1e-5, rtol=0)
    written = cli("generate", str(out), "the cat", "--greedy", "--max-new", "5")
    assert written.out.startswith("the cat")


def test_collaborate_says_how_far_fewer_dimensions_are(cli: Cli, text_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorly")
    words = ("collaborate", str(text_run), "--shared", "3", "--rounds", "5", "--out", str(tmp_path / "few"))
    told = cli(*words)
    assert told.code == 0, told.err
    assert "body.0.attention.inner" in told.out
    assert "parameters before" in told.out
    assert cli(*words).err.startswith("error: ")
    far = cli("collaborate", str(text_run), "--shared", "1000", "--out", str(tmp_path / "more"))
    assert far.code == 2
    assert "shared (1000) must be at least 1 and at most dim" in far.err
