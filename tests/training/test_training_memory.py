"""A training step that does not fit into memory: what is said, and what is left."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import a_run
from runs import go

from manyformer.nn.runtime.devices import OutOfMemory
from manyformer.training.engine import StepResult, TrainingEngine


def fail_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let a step, counted from 1, ask for more memory than there is."""
    calls, step = [0], TrainingEngine.step

    def counted(self: TrainingEngine, *args: Any) -> StepResult:
        calls[0] += 1
        return step(self, *args) if calls[0] < number else torch.empty(1 << 55)  # type: ignore[return-value]

    monkeypatch.setattr(TrainingEngine, "step", counted)


@pytest.mark.parametrize(("number", "kept"), [(1, "no checkpoint was written"), (7, r"checkpoints/\S+ is intact")])
def test_a_step_without_memory_names_the_settings_and_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kept: str
) -> None:
    fail_at(monkeypatch, number)
    message = (
        rf"out of memory in training step {number} \(.* at once\); make batch.tokens \(now \d+\) smaller, .*; .*{kept}"
    )
    with pytest.raises(OutOfMemory, match=message):
        go(a_run(tmp_path / "run"))
