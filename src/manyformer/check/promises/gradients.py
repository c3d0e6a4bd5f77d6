"""Every parameter takes part."""

import torch

from manyformer.check.contract import contract
from manyformer.check.trial import Finding, Trial, Untestable, broken, kept

SHOWN = 4


@contract("gradients", "every parameter gets a gradient", needs=("module",))
def gradients(trial: Trial) -> Finding:
    """A random function of the logits, and the auxiliary losses; a parameter without a gradient is never trained."""
    module = trial.subject.module
    assert module is not None
    weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    if not weights:
        raise Untestable("no parameter asks for a gradient")
    with torch.enable_grad():
        result = trial.subject(trial.draw(4, trial.length))
        weight = torch.randn(result.logits.shape, generator=trial.generator).to(result.logits)
        loss = (result.logits * weight).sum() + result.loss
        grads = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), allow_unused=True)))
    dead = [name for name, grad in grads.items() if grad is None or not grad.any()]
    sick = [name for name, grad in grads.items() if grad is not None and not torch.isfinite(grad).all()]
    if sick:
        return broken(f"the gradient is not finite of {_names(sick)}", float(len(sick)), 0.0)
    if dead:
        return broken(f"no gradient reaches {_names(dead)}", float(len(dead)), 0.0)
    return kept(f"all {len(grads)} parameters get a gradient", 0.0, 0.0)


def _names(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
