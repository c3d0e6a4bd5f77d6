"""What version 0.2.0 wrote is read by this one: models, a run that goes on, and an exported model.

`write.py` beside the folders made them with the code of that version, and `expected.json` has what it computed."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.inference.evaluate import evaluate

WRITTEN = Path(__file__).parent / "written_by_earlier_versions" / "0.2.0"
EXPECTED: dict[str, Any] = json.loads((WRITTEN / "expected.json").read_text())
PROMPT = "the cat "
TOLERANCE = 1e-4
"""Of losses and logits: torch and the processor may be others than those that wrote them."""


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    """A copy of what was written, as the current folder, as it was when the run began."""
    folder = tmp_path / "written"
    shutil.copytree(WRITTEN, folder)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def test_the_run_generates_the_same_tokens(written: Path) -> None:
    model = mf.load("run")
    assert mf.generate(model, PROMPT, max_new=24, temperature=0.0).tokens[0] == EXPECTED["generated"]
    assert mf.generate(model, PROMPT, max_new=12, beam=3).tokens[0] == EXPECTED["beam"]
    assert mf.generate(model, PROMPT, max_new=24, seed=5).tokens[0] == EXPECTED["sampled"]


def test_the_run_is_evaluated_to_the_same_scores(written: Path) -> None:
    scores = {score.name: score.value for score in evaluate("run").scores}
    assert scores == pytest.approx(EXPECTED["scores"], rel=TOLERANCE)


def test_the_run_goes_on_as_it_would_have_gone_on(written: Path) -> None:
    last = max(map(int, EXPECTED["losses"]))
    settings = [*EXPECTED["settings"], f"limits.steps={last}"]
    assert run(["train", "transformer-lm", *settings, "--quiet"]) == 0
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    losses = {str(row["step"]): row["loss"] for row in rows if "loss" in row}
    assert losses == pytest.approx(EXPECTED["losses"], rel=TOLERANCE)
    scores = {str(row["step"]): row["valid_loss"] for row in rows if "valid_loss" in row}
    assert scores == pytest.approx(EXPECTED["valid"], rel=TOLERANCE)


def test_the_saved_model_gives_the_same_logits(written: Path) -> None:
    model = mf.load("model")
    with torch.no_grad():
        logits = model(torch.arange(24)[None] % 13).logits[0, ::6, :4]
    torch.testing.assert_close(logits, torch.tensor(EXPECTED["logits"]), rtol=TOLERANCE, atol=TOLERANCE)


def test_the_exported_model_is_imported_and_generates_what_the_run_does(written: Path) -> None:
    model = mf.load("exported")
    assert mf.generate(model, PROMPT, max_new=24, temperature=0.0).tokens[0] == EXPECTED["generated"]


def test_files_are_verified_as_they_were(written: Path) -> None:
    assert run(["doctor", "run"]) == 0
    weights = written / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        mf.load("model")
