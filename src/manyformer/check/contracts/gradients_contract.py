"""Every parameter takes part."""

import torch
from torch import Tensor

from manyformer.check.contract import contract
from manyformer.check.contracts.loss_contract import as_batch
from manyformer.check.subject import Inputs
from manyformer.check.trial import ContractFinding, ContractTrial, Untestable, failed, gradients_of, passed
from manyformer.models import Model

SHOWN = 4


@contract("gradients", "every parameter gets a gradient", needs=("module",))
def gradients(trial: ContractTrial) -> ContractFinding:
    """A random function of the logits, and the auxiliary losses; a parameter without a gradient is never trained."""
    inputs = trial.draw(4, trial.length)

    def loss() -> Tensor:
        result = trial.subject(inputs)
        weight = torch.randn(result.logits.shape, generator=trial.generator).to(result.logits)
        return (result.logits * weight).sum() + result.loss + _extra(trial, inputs, result.logits)

    grads = gradients_of(trial, loss)
    if not grads:
        raise Untestable("no parameter asks for a gradient")
    dead = [name for name, grad in grads.items() if grad is None or not grad.any()]
    sick = [name for name, grad in grads.items() if grad is not None and not torch.isfinite(grad).all()]
    if sick:
        return failed(f"the gradient is not finite of {_names(sick)}", float(len(sick)), 0.0)
    if dead:
        return failed(f"no gradient reaches {_names(dead)}", float(len(dead)), 0.0)
    return passed(f"all {len(grads)} parameters get a gradient", 0.0, 0.0)


def _extra(trial: ContractTrial, inputs: Inputs, logits: Tensor) -> Tensor | float:
    """The auxiliary losses of training: some parameters serve nothing else."""
    model = trial.subject.module
    if not isinstance(model, Model):
        return 0.0
    targets = torch.randint(logits.shape[-1], logits.shape[:-1], generator=trial.generator).to(logits.device)
    return model.loss(as_batch(model, inputs, targets)).extra


def _names(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
