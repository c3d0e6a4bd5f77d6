"""The contract that a model learns a toy task that needs attention to other positions, within seconds."""

import math

import torch
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, Batch, ImageClassificationBatch, TaggingBatch
from manyformer.check.contract import contract
from manyformer.check.contracts.loss_contract import as_batch
from manyformer.check.trial import ContractFinding, ContractTrial
from manyformer.dependency_trees import preorder_columns
from manyformer.models import EncoderDecoder, ImageClassifier, MaskedLM, Model, Tagger, TextClassifier
from manyformer.recipes import build
from manyformer.tasks import Inputs

SYMBOLS, PERIOD, ROWS, STEPS, LEARNING_RATE = 8, 4, 32, 200, 6e-3

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
        losses = _train(trial, model, target_loss=MAX_LOSS_SHARE * _guessing_loss(model))
    first_loss, last_loss = _mean(losses[:SMOOTHING_STEPS]), _mean(losses[-SMOOTHING_STEPS:])
    guessing_loss = _guessing_loss(model)
    sentence = f"the loss falls from {first_loss:.2f} to {last_loss:.2f} nats in {len(losses)} steps"
    sentence = f"{sentence}, and guessing has {guessing_loss:.2f}"
    measured = last_loss / guessing_loss
    return ContractFinding(measured <= MAX_LOSS_SHARE, sentence, measured, MAX_LOSS_SHARE)


def _train(trial: ContractTrial, model: Model, *, target_loss: float) -> list[float]:
    """The losses of all steps in nats per target, until their recent mean is at most `target_loss`."""
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    losses: list[float] = []
    for step in range(STEPS):
        loss = model.loss(toy_batch(trial, model))
        optimizer.zero_grad()
        ((loss.total / loss.targets) + loss.extra).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20) * min(1.0, 2 * (1 - step / STEPS))
        optimizer.step()
        losses.append(float(loss.total.detach() / loss.targets))
        if step >= SMOOTHING_STEPS and _mean(losses[-SMOOTHING_STEPS:]) <= target_loss:
            break
    return losses


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def toy_batch(trial: ContractTrial, model: Model) -> Batch:
    """A batch of the toy task of this kind of model, over the tokens 5 to 12; token 1 is the start and 4 the mask."""
    repeats = trial.round_length(6 * PERIOD) // PERIOD
    symbols = _random_symbols(trial, ROWS, PERIOD)
    rows = symbols.repeat(1, repeats)
    if isinstance(model, EncoderDecoder):
        target = torch.cat([torch.ones_like(symbols[:, :1]), symbols.flip(1)[:, :-1]], dim=1)
        return as_batch(model, Inputs(target, None, symbols), symbols.flip(1))
    if isinstance(model, TextClassifier):
        return _token_order_batch(trial, model)
    if isinstance(model, ImageClassifier):
        return _patch_order_batch(trial, model)
    if isinstance(model, Tagger):
        return _parent_label_batch(trial)
    if isinstance(model, MaskedLM):
        masked = torch.rand(rows.shape, generator=trial.generator) < 0.15
        masked[:, 0] = True
        masked = masked.to(rows.device)
        return as_batch(model, Inputs(rows.masked_fill(masked, 4)), rows.masked_fill(~masked, IGNORE_INDEX))
    targets = rows.roll(-1, dims=1)
    # tokens are predictable only from the second period on
    targets[:, : PERIOD - 1], targets[:, -1] = IGNORE_INDEX, IGNORE_INDEX
    return as_batch(model, Inputs(rows), targets)


def _token_order_batch(trial: ContractTrial, model: Model) -> Batch:
    """Rows of eight tokens with one 5 and one 6; the label is whether the 5 comes first."""
    tokens = _random_symbols(trial, ROWS, 2 * PERIOD).clamp(min=7)
    order = torch.rand(tokens.shape, generator=trial.generator).argsort(dim=1)[:, :2].to(tokens.device)
    tokens.scatter_(1, order[:, :1], 5).scatter_(1, order[:, 1:], 6)
    return as_batch(model, Inputs(tokens), (order[:, 0] < order[:, 1]).long())


def _parent_label_batch(trial: ContractTrial) -> Batch:
    """Rows whose tokens depend on the previous one; the label is whether that token is in the upper half."""
    tokens = _random_symbols(trial, ROWS, 2 * PERIOD)
    targets = (tokens.roll(1, 1) >= 5 + SYMBOLS // 2).long()
    targets[:, 0] = IGNORE_INDEX
    chain = torch.from_numpy(preorder_columns(range(tokens.shape[1]))).to(tokens.device)
    return TaggingBatch(tokens, targets, None, chain.expand(ROWS, -1, -1))


def _patch_order_batch(trial: ContractTrial, model: ImageClassifier) -> Batch:
    """Gray images with one dark and one bright patch; the label is whether the dark one comes first."""
    height, width, channels = model.embed.shape
    patch_size = model.embed.patch
    patches = (height // patch_size) * (width // patch_size)
    order = torch.rand(ROWS, patches, generator=trial.generator).argsort(dim=1)[:, :2]
    grid = torch.full((ROWS, patches), 128, dtype=torch.uint8)
    grid.scatter_(1, order[:, :1], 0).scatter_(1, order[:, 1:], 255)
    rows = grid.view(ROWS, height // patch_size, width // patch_size, 1)
    images = rows.repeat_interleave(patch_size, 1).repeat_interleave(patch_size, 2).expand(-1, -1, -1, channels)
    device = trial.subject.token_ids.device
    return ImageClassificationBatch(images.contiguous().to(device), (order[:, 0] < order[:, 1]).long().to(device))


def _random_symbols(trial: ContractTrial, rows: int, length: int) -> Tensor:
    symbols = torch.randint(5, 5 + SYMBOLS, (rows, length), generator=trial.generator)
    return symbols.to(trial.subject.token_ids.device)


def _guessing_loss(model: Model) -> float:
    return math.log(2 if isinstance(model, TextClassifier | Tagger | ImageClassifier) else SYMBOLS)
