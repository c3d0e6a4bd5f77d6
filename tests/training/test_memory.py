"""A model's memory in training: carried from batch to batch, kept in checkpoints, begun anew for validation."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import a_run
from runs import Heard, go, learned, stopped
from safetensors import safe_open
from safetensors.torch import load_file

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import AdamWConfig, EvaluateConfig, RunConfig
from manyformer.models import LanguageModel
from manyformer.models.model import CarriedState
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.batches import CausalLMBatch
from manyformer.training.build_model import open_run_data
from manyformer.training.engine import TrainingEngine
from manyformer.training.events import TrainingStarted
from manyformer.training.process_group import SINGLE_PROCESS_GROUP, DDPStrategy
from manyformer.training.validation import Validator

WORDS: dict[str, Any] = {"dim": 16, "depth": 2, "heads": 2, "memory_length": 12, "dropout": 0.1}


def a_lane_run(tmp_path: Path, name: str, recipe: str = "transformer-xl", **given: Any) -> RunConfig:
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 30)
    data = {"kind": "text", "path": str(text), "length": 8, "packing": "contiguous", "valid": 0.2}
    settings = {"model": WORDS, "data": data, "batch": {"tokens": 32, "accumulate": 2}, "limits": {"steps": 6}}
    return a_run(tmp_path / name, recipe, **{**settings, "evaluate": {"every": 2}, "save": {"every": 3}, **given})


MORE: dict[str, dict[str, Any]] = {
    "transformer-xl": {},
    "compressive-transformer": {"compressed_length": 6, "rate": 2, "teacher": "through-time"},
    "memorizing-transformer": {"knn_memory_size": 20, "neighbours": 4, "block": 8},
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("recipe", MORE)
def test_a_killed_run_goes_on_with_its_memory(recipe: str, tmp_path: Path) -> None:
    given: dict[str, Any] = {"recipe": recipe, "model": WORDS | MORE[recipe]}
    heard = Heard()
    go(a_lane_run(tmp_path, "whole", **given), heard, opened=open_run_data)
    run = a_lane_run(tmp_path, "run", **given)
    for step in (2, 4):
        stopped(run, step, opened=open_run_data)
    go(run, opened=open_run_data)
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    # not byte by byte: the file lists several tied weights in any order
    one, other = (load_file(tmp_path / name / "model/model.safetensors") for name in ("run", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one.keys() | other.keys())
    (started,) = (event for event in heard if isinstance(event, TrainingStarted))
    assert ("memory", "carried from batch to batch") in started.summary_lines
    kept = sorted((tmp_path / "run/checkpoints").glob("*/memory-0-of-1.safetensors"))
    assert kept
    with safe_open(kept[-1], "pt") as opened:
        assert opened.metadata()["rows"] == "4"


def test_without_rows_that_go_on_the_memory_stays_empty_and_this_is_told(tmp_path: Path) -> None:
    run = a_lane_run(tmp_path, "run", limits={"steps": 3}, evaluate={"every": None})
    stream = run.model_copy(update={"data": run.data.model_copy(update={"packing": "concat"})})
    heard = Heard()
    go(stream, heard, opened=open_run_data)
    (started,) = (event for event in heard if isinstance(event, TrainingStarted))
    (line,) = (text for name, text in started.summary_lines if name == "memory")
    assert "data.packing=contiguous" in line
    assert not list((tmp_path / "run/checkpoints").glob("*/memory*"))


def test_a_model_that_looks_things_up_is_told_where_nothing_is_to_be_found(tmp_path: Path) -> None:
    heard = Heard()
    go(a_lane_run(tmp_path, "run", recipe="spalm"), heard, opened=open_run_data)
    (started,) = (event for event in heard if isinstance(event, TrainingStarted))
    (line,) = (text for name, text in started.summary_lines if name == "neighbours")
    assert "data.neighbours" in line


def batches(count: int, length: int = 6, rows: int = 3) -> list[CausalLMBatch]:
    tokens = torch.randint(0, 11, (rows, count * length + 1))
    return [
        CausalLMBatch(tokens[:, n * length : (n + 1) * length], tokens[:, n * length + 1 : (n + 1) * length + 1])
        for n in range(count)
    ]


def tiny(**words: Any) -> LanguageModel:
    model = mf.build("transformer-xl", **{**WORDS, "vocab": 11, "dropout": 0.0, "memory_length": 50, **words})
    assert isinstance(model, LanguageModel)
    return model


SMALL: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 2, "heads": 2, "dropout": 0.0}
CARRYING: dict[str, dict[str, Any]] = {
    "transformer-xl": {"memory_length": 50},
    "adaptive-span": {"memory_length": 50, "max_span": 40, "span_init": 1.0},
    "rfa": {"carried_memory": "detached", "redraw": None, "features": 8},
}


@pytest.mark.parametrize("recipe", CARRYING)
def test_steps_learn_from_what_was_read_before(recipe: str) -> None:
    model, read = mf.build(recipe, **SMALL, **CARRYING[recipe]), batches(3)
    assert isinstance(model, LanguageModel)
    engine = TrainingEngine(
        model,
        AdamWConfig(lr=1e-3),
        DDPStrategy(),
        rows_continue=True,
    )
    for batch in read:
        stepped = engine.step([batch], 0.0)
    full = CausalLMBatch(*(torch.cat([batch[n] for batch in read], 1) for n in (0, 1)))  # type: ignore[arg-type]
    logits = model(full.tokens).logits[:, 12:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), full.targets[:, 12:].flatten())
    torch.testing.assert_close(stepped.figures[0], expected.detach(), atol=1e-5, rtol=1e-5)
    engine.step([batches(1, rows=2)[0]], 0.0)
    assert engine.carried_state.rows == 2


def test_a_memory_of_other_features_is_refused() -> None:
    with pytest.raises(UserError, match="carried_memory needs redraw=null"):
        mf.build("rfa", **SMALL, carried_memory="detached")
    assert not mf.build("rfa", **SMALL).carries_state


class Held(list[CausalLMBatch]):
    units = None
    rows_continue = True

    def shard(self, rank: int, world_size: int) -> "Held":
        return self


def test_every_validation_begins_with_an_empty_memory_and_leaves_that_of_training_alone() -> None:
    model, read = tiny(), Held(batches(4))
    engine = TrainingEngine(
        model,
        AdamWConfig(lr=1e-3),
        DDPStrategy(),
        rows_continue=True,
    )
    engine.step([read[0]], 0.0)
    before = engine.carried_state.state
    judge = Validator(engine.scorer, read, EvaluateConfig(), SINGLE_PROCESS_GROUP, task=LANGUAGE_MODELLING)
    first, second = judge(), judge()
    assert first == second
    assert engine.carried_state.state is before
    part = Validator(engine.scorer, read, EvaluateConfig(batches=2), SINGLE_PROCESS_GROUP, task=LANGUAGE_MODELLING)()
    for actual, length in ((first, 24), (part, 12)):
        tokens, targets = (torch.cat([batch[n] for batch in read], 1)[:, :length] for n in (0, 1))  # type: ignore[misc]
        with torch.no_grad():
            nll = float(model.eval().score(CausalLMBatch(tokens, targets)).nll)
        assert actual is not None
        assert actual["loss"] == pytest.approx(nll / targets.numel(), abs=1e-5)


def test_only_models_with_a_memory_carry_one() -> None:
    assert tiny().carries_state
    assert not tiny(memory_length=None).carries_state
    assert not mf.build("transformer-lm", vocab=11, dim=8, depth=1, heads=2).carries_state
    assert CarriedState(tiny(), rows_continue=False).state_for(batches(1)[0]) is None


def test_rows_that_continue_are_for_recipes_with_a_memory(tmp_path: Path) -> None:
    one_step: dict[str, Any] = {"limits": {"steps": 3}, "evaluate": {"every": None}}
    longformer = a_lane_run(tmp_path, "none", "longformer-lm", model={"dim": 16, "depth": 2, "heads": 2}, **one_step)
    with pytest.raises(UserError, match=r"rows for a model with a memory, and longformer-lm has none; set"):
        go(longformer, opened=open_run_data)
    # what a memory is compared with
    go(a_lane_run(tmp_path, "off", model=WORDS | {"memory_length": None}, **one_step), opened=open_run_data)
