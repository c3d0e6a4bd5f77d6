"""`manyformer doctor --recipes`: a training step of every recipe on the device of this machine, and decoding."""

from collections.abc import Iterator
from typing import Any

import torch

from manyformer.check.tiny_models import build_tiny
from manyformer.cli.doctor_checks import CheckStatus, DoctorFinding
from manyformer.generate import generate
from manyformer.models import Model
from manyformer.recipes import RECIPES
from manyformer.recipes.registry import task_of
from manyformer.system.devices import device_kind, missing_need
from manyformer.train.step_job import StepJob, own_engine

ROWS = 2
TOKENS = 32
PROMPTS = ([1, 2, 3], [4, 5])
NEW_TOKENS = 3


def try_recipes(device: torch.device) -> Iterator[DoctorFinding]:
    """Try every recipe with tiny sizes; yields a finding for each that does not work, and one for the others."""
    working = 0
    title = device_kind(device).describe(device)
    for name in sorted(RECIPES):
        finding = try_recipe(name, device)
        if finding is None:
            working += 1
        else:
            yield finding
    yield DoctorFinding("recipes", "ok", f"{working} of {len(RECIPES)} train and decode on {device.type} ({title})")


def try_recipe(name: str, device: torch.device) -> DoctorFinding | None:
    """What is wrong with a recipe on a device; None if it works."""
    try:
        model: Any = build_tiny(name, {}, 0).to(device)
        _train_step(model)
        if task_of(model).generates in ("continuation", "answer"):
            generate(model, PROMPTS, max_new=NEW_TOKENS, stop_ids=())
    except Exception as error:
        missing = missing_need(error)
        state: CheckStatus = "broken" if missing is None else "absent"
        reason = f"{type(error).__name__}: {str(error)[:120]}"
        return DoctorFinding(name, state, reason if missing is None else f"{missing[1]} has no {missing[0]}")
    return None


def _train_step(model: Model) -> None:
    task = task_of(model)
    generator = torch.Generator().manual_seed(0)
    length = task.fixed_length(model) or min(TOKENS, model.max_length or TOKENS)
    tokens = torch.randint(task.token_ids(model), (ROWS, length), generator=generator)
    inputs = task.example(model, tokens)
    targets = task.random_targets(model, inputs, generator)
    StepJob(own_engine(model, autocast=None), [task.batch(model, inputs, targets)])()
