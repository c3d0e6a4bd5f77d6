"""A run that goes on from a checkpoint of another run, and what it may decay from."""

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import a_run
from runs import Heard, go, learned, stopped

from manyformer.base.errors import UserError

WSD: dict[str, Any] = {"name": "wsd", "warmup": 2}


def test_a_branched_decay_equals_a_run_that_was_trained_through(tmp_path: Path) -> None:
    through = a_run(tmp_path / "through", schedule={**WSD, "decay_share": 0.4}, limits={"steps": 20})
    go(through)
    plateau = a_run(tmp_path / "plateau", schedule=WSD, limits={"steps": 400}, save={"every": 6})
    assert stopped(plateau, 12).startswith("stopped at step 12")
    decay = a_run(
        tmp_path / "decay",
        schedule={**WSD, "decay_from": "now"},
        limits={"steps": 20},
        branch_from=str(tmp_path / "plateau"),
    )
    # interrupted on the way too: the same command goes on from its own checkpoints
    assert stopped(decay, 15).startswith("stopped at step 15")
    go(decay)
    rows = learned(tmp_path / "through")
    # the evaluation of step 12 was interrupted, so that the branch makes it
    begin = next(number for number, row in enumerate(rows) if row["step"] == 12 and "valid_loss" in row)
    assert learned(tmp_path / "decay") == rows[begin:]
    weights = "checkpoints/step-00000020/model.safetensors"
    assert (tmp_path / "decay" / weights).read_bytes() == (tmp_path / "through" / weights).read_bytes()
    assert min(row["learning_rate"] for row in learned(tmp_path / "decay") if "loss" in row) == pytest.approx(1e-2 / 8)


def test_a_branch_takes_the_checkpoint_that_is_named_and_leaves_the_other_run_alone(tmp_path: Path) -> None:
    go(a_run(tmp_path / "first", schedule=WSD, save={"every": 4, "keep_last": 3, "keep_best": 3}))
    files = {path: path.read_bytes() for path in (tmp_path / "first").rglob("*") if path.is_file()}
    checkpoint = tmp_path / "first" / "checkpoints" / "step-00000004"
    heard = Heard()
    go(
        a_run(tmp_path / "second", limits={"steps": 6}, save={"every": 4, "keep_best": 3}, branch_from=str(checkpoint)),
        heard,
    )
    assert f"going on from step 4 of {checkpoint}" in heard.notes
    assert [row["step"] for row in learned(tmp_path / "second") if "loss" in row] == [5, 6]
    state = json.loads((tmp_path / "second/checkpoints/step-00000006/state.json").read_text())
    assert state["train_state"]["branch"][0] == 4
    # scores of the other run rank no checkpoint of this one
    assert [entry[1] for entry in state["train_state"]["ranking"]] == [6]
    assert {path: path.read_bytes() for path in files} == files


def test_branches_that_cannot_be_are_refused(tmp_path: Path) -> None:
    go(a_run(tmp_path / "run"))
    for branch_from, out, sentence in (
        (tmp_path / "nowhere", "new", "nowhere/checkpoints holds no checkpoint; give the folder of a run"),
        (tmp_path / "run/checkpoints/step-00000003", "new", "step-00000003"),
        (tmp_path / "new", "new", "the folder of this run itself"),
        (tmp_path / "run", "new", "is where this run ends already (limits.steps 12 reached); set a greater limit"),
    ):
        with pytest.raises(UserError) as refusal:
            go(a_run(tmp_path / out, branch_from=str(branch_from)))
        assert sentence in str(refusal.value)
    with pytest.raises(ValueError, match="needs branch_from"):
        a_run(tmp_path / "new", schedule={**WSD, "decay_from": "now"})
    with pytest.raises(ValueError, match=r"must be above 0, such as 0\.01"):
        a_run(tmp_path / "new", schedule={**WSD, "shape": "exponential"})
