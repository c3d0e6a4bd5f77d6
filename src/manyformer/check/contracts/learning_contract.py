"""It learns: a toy task that needs attention to places, in seconds."""

import math

import torch
from torch import Tensor

from manyformer.batches import IGNORE_INDEX, Batch, ImageClassificationBatch, TaggingBatch
from manyformer.check.contract import contract
from manyformer.check.contracts.loss_contract import as_batch
from manyformer.check.subject import Inputs
from manyformer.check.trial import ContractFinding, ContractTrial
from manyformer.dependency_trees import preorder_columns
from manyformer.models import EncoderDecoder, ImageClassifier, MaskedLM, Model, Tagger, TextClassifier
from manyformer.recipes import build

SYMBOLS, PERIOD, ROWS, STEPS, RATE = 8, 4, 32, 200, 6e-3

SMOOTH = 10
"""Losses are told as means of so many steps."""

BOUND = 0.75
"""The loss must fall below this share of what guessing costs, which only a look at other places can bring about."""


@contract("learns", "a toy task is learnt in seconds", needs=("loss", "spec"), usual=False)
def learns(trial: ContractTrial) -> ContractFinding:
    """Copying at a distance, reversing, filling in, telling an order or a neighbour, by kind of model, in 200 steps.

    A fresh model is made for it, so that of a trained one only the sizes matter. It ends as soon as enough is learnt.
    """
    given = trial.subject.module
    assert isinstance(given, Model)
    model = build(given.spec.recipe, **given.spec.keywords).to(given.device)
    with torch.enable_grad():
        losses = _train(trial, model, enough=BOUND * _guess(model))
    first, last = _mean(losses[:SMOOTH]), _mean(losses[-SMOOTH:])
    told = f"{len(losses)} steps bring the loss from {first:.2f} to {last:.2f} nats, guessing costs {_guess(model):.2f}"
    measured = last / _guess(model)
    return ContractFinding(measured <= BOUND, told, measured, BOUND)


def _train(trial: ContractTrial, model: Model, *, enough: float) -> list[float]:
    """The losses of all steps, in nats per target, until the mean of the last few is `enough`."""
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    losses: list[float] = []
    for step in range(STEPS):
        loss = model.loss(toy(trial, model))
        optimizer.zero_grad()
        ((loss.total / loss.targets) + loss.extra).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20) * min(1.0, 2 * (1 - step / STEPS))
        optimizer.step()
        losses.append(float(loss.total.detach() / loss.targets))
        if step >= SMOOTH and _mean(losses[-SMOOTH:]) <= enough:
            break
    return losses


def _mean(losses: list[float]) -> float:
    return sum(losses) / len(losses)


def toy(trial: ContractTrial, model: Model) -> Batch:
    """A batch of the task for this kind of model, over the tokens 5 to 12; tokens 1 and 4 are start and mask."""
    repeats = trial.round_length(6 * PERIOD) // PERIOD
    symbols = _symbols(trial, ROWS, PERIOD)
    rows = symbols.repeat(1, repeats)
    if isinstance(model, EncoderDecoder):
        target = torch.cat([torch.ones_like(symbols[:, :1]), symbols.flip(1)[:, :-1]], dim=1)
        return as_batch(model, Inputs(target, None, symbols), symbols.flip(1))
    if isinstance(model, TextClassifier):
        return _which_comes_first(trial, model)
    if isinstance(model, ImageClassifier):
        return _whether_alike(trial, model)
    if isinstance(model, Tagger):
        return _whether_the_neighbour_is_large(trial)
    if isinstance(model, MaskedLM):
        hidden = torch.rand(rows.shape, generator=trial.generator) < 0.15
        hidden[:, 0] = True
        hidden = hidden.to(rows.device)
        return as_batch(model, Inputs(rows.masked_fill(hidden, 4)), rows.masked_fill(~hidden, IGNORE_INDEX))
    targets = rows.roll(-1, dims=1)
    # nothing can be known before the second time round
    targets[:, : PERIOD - 1], targets[:, -1] = IGNORE_INDEX, IGNORE_INDEX
    return as_batch(model, Inputs(rows), targets)


def _which_comes_first(trial: ContractTrial, model: Model) -> Batch:
    """Among eight tokens one 5 and one 6; the label says which stands before the other."""
    tokens = _symbols(trial, ROWS, 2 * PERIOD).clamp(min=7)
    order = torch.rand(tokens.shape, generator=trial.generator).argsort(dim=1)[:, :2].to(tokens.device)
    tokens.scatter_(1, order[:, :1], 5).scatter_(1, order[:, 1:], 6)
    return as_batch(model, Inputs(tokens), (order[:, 0] < order[:, 1]).long())


def _whether_the_neighbour_is_large(trial: ContractTrial) -> Batch:
    """Every token hangs on the one before and is to tell whether that is one of the upper half."""
    tokens = _symbols(trial, ROWS, 2 * PERIOD)
    targets = (tokens.roll(1, 1) >= 5 + SYMBOLS // 2).long()
    targets[:, 0] = IGNORE_INDEX
    chain = torch.from_numpy(preorder_columns(range(tokens.shape[1]))).to(tokens.device)
    return TaggingBatch(tokens, targets, None, chain.expand(ROWS, -1, -1))


def _whether_alike(trial: ContractTrial, model: ImageClassifier) -> Batch:
    """A dark and a bright patch somewhere in a grey image; the label says which comes first."""
    height, width, channels = model.embed.shape
    side = model.embed.patch
    patches = (height // side) * (width // side)
    order = torch.rand(ROWS, patches, generator=trial.generator).argsort(dim=1)[:, :2]
    grid = torch.full((ROWS, patches), 128, dtype=torch.uint8)
    grid.scatter_(1, order[:, :1], 0).scatter_(1, order[:, 1:], 255)
    rows = grid.view(ROWS, height // side, width // side, 1)
    images = rows.repeat_interleave(side, 1).repeat_interleave(side, 2).expand(-1, -1, -1, channels)
    device = trial.subject.token_ids.device
    return ImageClassificationBatch(images.contiguous().to(device), (order[:, 0] < order[:, 1]).long().to(device))


def _symbols(trial: ContractTrial, rows: int, length: int) -> Tensor:
    drawn = torch.randint(5, 5 + SYMBOLS, (rows, length), generator=trial.generator)
    return drawn.to(trial.subject.token_ids.device)


def _guess(model: Model) -> float:
    return math.log(2 if isinstance(model, TextClassifier | Tagger | ImageClassifier) else SYMBOLS)
