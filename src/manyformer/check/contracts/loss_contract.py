"""The contract that the training loss and the score equal the cross entropy of the logits."""

import torch
import torch.nn.functional as F

from manyformer.batches import IGNORE_INDEX
from manyformer.check.contract import contract
from manyformer.check.contracts.padding_contract import document_lengths
from manyformer.check.padded_rows import pad_documents
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference
from manyformer.models import Model
from manyformer.recipes.registry import task_of


@contract("loss", "training loss and score == cross entropy of the logits", needs=("loss",))
def loss(trial: ContractTrial) -> ContractFinding:
    """Compare them with padding, with ignored targets and with label smoothing."""
    model, worst = trial.subject.module, WorstDifference()
    assert isinstance(model, Model)
    inputs, _ = pad_documents(trial, trial.documents(document_lengths(trial)), "right")
    result = trial.subject(inputs)
    classes = result.logits.shape[-1]
    targets = torch.randint(classes, result.logits.shape[:-1], generator=trial.generator).to(inputs.tokens.device)
    if inputs.segments is not None and targets.ndim == 2:
        # every fifth target is ignored, as well as padding
        ignored = torch.arange(targets.numel(), device=targets.device).view_as(targets) % 5 == 0
        targets = targets.masked_fill((inputs.segments < 0) | ignored, IGNORE_INDEX)
    batch, logits = task_of(model).batch(model, inputs, targets), result.logits.flatten(0, -2).double()
    for smoothing in (0.0, 0.1):
        expected = F.cross_entropy(logits, targets.flatten(), label_smoothing=smoothing, reduction="sum")
        worst.add(model.loss(batch, label_smoothing=smoothing).total, expected, f"the loss with smoothing {smoothing}")
    scored, is_target = model.score(batch), targets != IGNORE_INDEX
    correct = (result.logits.argmax(-1) == targets) & is_target
    worst.add(scored.nll.cpu(), F.cross_entropy(logits, targets.flatten(), reduction="sum").cpu(), "the score")
    worst.add(scored.targets, is_target.sum(), "the number of targets")
    worst.add(scored.correct, correct.sum(), "the number of right answers")
    return worst.finding(f"loss and score of {int(is_target.sum())} targets are those of the logits", trial.tolerance)
