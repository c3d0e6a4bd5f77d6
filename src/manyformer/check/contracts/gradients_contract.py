"""The contract that every parameter gets a finite gradient."""

import torch
from torch import Tensor

from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, Untestable, failed, gradients_of, passed
from manyformer.models import Model
from manyformer.recipes.registry import task_of
from manyformer.tasks import Inputs

MAX_NAMES = 4


@contract("gradients", "every parameter gets a gradient", needs=("module",))
def gradients(trial: ContractTrial) -> ContractFinding:
    """Differentiate a random function of the logits plus the auxiliary losses; every parameter must get a gradient."""
    inputs = trial.draw(4, trial.length)

    def loss() -> Tensor:
        result = trial.subject(inputs)
        weight = torch.randn(result.logits.shape, generator=trial.generator).to(result.logits)
        return (result.logits * weight).sum() + result.loss + _auxiliary_loss(trial, inputs, result.logits)

    grads = gradients_of(trial, loss)
    if not grads:
        raise Untestable("no parameter requires a gradient")
    missing = [name for name, grad in grads.items() if grad is None or not grad.any()]
    non_finite = [name for name, grad in grads.items() if grad is not None and not torch.isfinite(grad).all()]
    if non_finite:
        return failed(f"the gradient of {_join_names(non_finite)} is not finite", float(len(non_finite)), 0.0)
    if missing:
        return failed(f"no gradient reaches {_join_names(missing)}", float(len(missing)), 0.0)
    return passed(f"all {len(grads)} parameters get a gradient", 0.0, 0.0)


def _auxiliary_loss(trial: ContractTrial, inputs: Inputs, logits: Tensor) -> Tensor | float:
    """The auxiliary losses of training, which are the only use of some parameters."""
    model = trial.subject.module
    if not isinstance(model, Model):
        return 0.0
    targets = torch.randint(logits.shape[-1], logits.shape[:-1], generator=trial.generator).to(logits.device)
    return model.loss(task_of(model).batch(model, inputs, targets)).extra


def _join_names(names: list[str]) -> str:
    omitted = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {omitted} more" if omitted > 0 else "")
