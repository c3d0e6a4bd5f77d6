"""The contracts of training: gradients reach every parameter, the loss is right, and a toy task is learned."""

import statistics

import torch
import torch.nn.functional as F
from torch import Tensor

from manyformer.analysis.contracts.subject import Untestable
from manyformer.analysis.contracts.trial import (
    ContractFinding,
    ContractTrial,
    contract,
    document_lengths,
    failed,
    gradients_of,
    join_names,
    pad_documents,
    passed,
)
from manyformer.nn.model_inputs import Inputs

IGNORED_TARGET = -100
"""The target that no loss counts, as `cross_entropy` of torch has it by default."""

SMOOTHING_STEPS = 10
"""Losses are averaged over this many steps."""

MAX_LOSS_SHARE = 0.75
"""The loss must fall below this share of the loss of guessing, which needs attention to other positions."""


@contract("gradients", "every parameter gets a gradient", needs=("module",))
def gradients(trial: ContractTrial) -> ContractFinding:
    """Differentiate a random function of the logits plus the auxiliary losses; every parameter must get a gradient."""
    inputs = trial.draw(4, trial.length)

    def loss() -> Tensor:
        result = trial.subject(inputs)
        # random weights for every logit: a sum of all logits has no gradient behind a softmax or a norm
        weight = torch.randn(result.logits.shape, generator=trial.generator).to(result.logits)
        return (result.logits * weight).sum() + result.loss + _auxiliary_loss(trial, inputs, result.logits)

    grads = gradients_of(trial, loss)
    if not grads:
        raise Untestable("no parameter requires a gradient")
    # a gradient of zeros is none: the parameter would never be trained
    missing = [name for name, grad in grads.items() if grad is None or not grad.any()]
    non_finite = [name for name, grad in grads.items() if grad is not None and not torch.isfinite(grad).all()]
    if non_finite:
        return failed(f"the gradient of {join_names(non_finite)} is not finite", float(len(non_finite)), 0.0)
    if missing:
        return failed(f"no gradient reaches {join_names(missing)}", float(len(missing)), 0.0)
    return passed(f"all {len(grads)} parameters get a gradient", 0.0, 0.0)


def _auxiliary_loss(trial: ContractTrial, inputs: Inputs, logits: Tensor) -> Tensor | float:
    """The auxiliary losses of training, which are the only use of some parameters."""
    targets = torch.randint(logits.shape[-1], logits.shape[:-1], generator=trial.generator).to(logits.device)
    return trial.subject.auxiliary_loss(inputs, targets)


@contract("loss", "training loss and score == cross entropy of the logits", needs=("loss", "cross_entropy"))
def loss(trial: ContractTrial) -> ContractFinding:
    """Compare them with padding, with ignored targets and with label smoothing."""
    inputs, _ = pad_documents(trial, trial.documents(document_lengths(trial)), "right")
    result = trial.subject(inputs)
    classes = result.logits.shape[-1]
    targets = torch.randint(classes, result.logits.shape[:-1], generator=trial.generator).to(inputs.tokens.device)
    if inputs.segments is not None and targets.ndim == 2:
        # every fifth target is ignored, as well as padding
        ignored = torch.arange(targets.numel(), device=targets.device).view_as(targets) % 5 == 0
        targets = targets.masked_fill((inputs.segments < 0) | ignored, IGNORED_TARGET)
    # the reference in float64 on the CPU, so that only the loss under test rounds
    logits = result.logits.flatten(0, -2).cpu().double()
    host_targets = targets.flatten().cpu()
    for smoothing in (0.0, 0.1):
        expected = F.cross_entropy(logits, host_targets, label_smoothing=smoothing, reduction="sum")
        actual = trial.subject.training_loss(inputs, targets, smoothing=smoothing)
        trial.compare(actual, expected, f"the loss with smoothing {smoothing}")
    scored = trial.subject.score(inputs, targets)
    is_target = targets != IGNORED_TARGET
    correct = (result.logits.argmax(-1) == targets) & is_target
    trial.compare(scored.nll.cpu(), F.cross_entropy(logits, host_targets, reduction="sum"), "the score")
    trial.compare(scored.targets, is_target.sum(), "the number of targets")
    trial.compare(scored.correct, correct.sum(), "the number of right answers")
    return trial.finding(f"loss and score of {int(is_target.sum())} targets are those of the logits")


@contract("learns", "a toy task is learned in seconds", needs=("loss", "spec"), runs_by_default=False)
def learns(trial: ContractTrial) -> ContractFinding:
    """Train a new model with the same keywords on a toy task for at most 200 steps, until the loss is low enough.

    By kind of model the task is periodic copying, reversing, filling in masks, or classifying an order or a parent.
    """
    training = trial.subject.train_on_toy_task(trial.generator, share=MAX_LOSS_SHARE, smoothing_steps=SMOOTHING_STEPS)
    losses = training.losses
    first_loss = statistics.fmean(losses[:SMOOTHING_STEPS])
    last_loss = statistics.fmean(losses[-SMOOTHING_STEPS:])
    sentence = f"the loss falls from {first_loss:.2f} to {last_loss:.2f} nats in {len(losses)} steps"
    sentence = f"{sentence}, and guessing has {training.guessing_loss:.2f}"
    measured = last_loss / training.guessing_loss
    return ContractFinding(measured <= MAX_LOSS_SHARE, sentence, measured, MAX_LOSS_SHARE)
