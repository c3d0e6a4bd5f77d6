"""The contract that a model learns a toy task that needs attention to other positions, within seconds."""

import torch

from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial
from manyformer.models import Model
from manyformer.recipes import build
from manyformer.recipes.registry import task_of
from manyformer.tasks import ToyDraw
from manyformer.tasks.toy import PERIOD

STEPS, LEARNING_RATE = 200, 6e-3

PERIODS = 6
"""The number of periods in a row of repeated symbols."""

SMOOTHING_STEPS = 10
"""Losses are averaged over this many steps."""

MAX_LOSS_SHARE = 0.75
"""The loss must fall below this share of the loss of guessing, which needs attention to other positions."""


@contract("learns", "a toy task is learned in seconds", needs=("loss", "spec"), runs_by_default=False)
def learns(trial: ContractTrial) -> ContractFinding:
    """Train a new model with the same keywords on a toy task for at most 200 steps, until the loss is low enough.

    By kind of model the task is periodic copying, reversing, filling in masks, or classifying an order or a parent.
    """
    checked_model = trial.subject.module
    assert isinstance(checked_model, Model)
    model = build(checked_model.spec.recipe, **checked_model.spec.keywords).to(checked_model.device)
    with torch.enable_grad():
        losses, guessing_loss = _train(trial, model)
    first_loss, last_loss = _mean(losses[:SMOOTHING_STEPS]), _mean(losses[-SMOOTHING_STEPS:])
    sentence = f"the loss falls from {first_loss:.2f} to {last_loss:.2f} nats in {len(losses)} steps"
    sentence = f"{sentence}, and guessing has {guessing_loss:.2f}"
    measured = last_loss / guessing_loss
    return ContractFinding(measured <= MAX_LOSS_SHARE, sentence, measured, MAX_LOSS_SHARE)


def _train(trial: ContractTrial, model: Model) -> tuple[list[float], float]:
    """The losses of all steps in nats per target, until their recent mean is low enough, and the loss of guessing."""
    task, length = task_of(model), trial.round_length(PERIODS * PERIOD)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    losses, guessing_loss = list[float](), 0.0
    for step in range(STEPS):
        draw = ToyDraw.make(trial.generator, trial.subject.token_ids.device, length)
        batch, guessing_loss = task.toy(model, draw)
        loss = model.loss(batch)
        optimizer.zero_grad()
        ((loss.total / loss.targets) + loss.extra).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * min(1.0, 2 * (1 - step / STEPS))
        optimizer.step()
        losses.append(float(loss.total.detach() / loss.targets))
        if step >= SMOOTHING_STEPS and _mean(losses[-SMOOTHING_STEPS:]) <= MAX_LOSS_SHARE * guessing_loss:
            break
    return losses, guessing_loss


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)
