"""The same input gives the same output: without that, no comparison means anything."""

import torch

from manyformer.check.contract import contract
from manyformer.check.trial import Finding, Trial, broken, kept


@contract("repeatable", "the same input twice, with the same seed, gives the same finite output")
def repeatable(trial: Trial) -> Finding:
    """Two calls with equal random numbers must agree in every bit."""
    inputs = trial.draw(2, trial.length)
    first, second = (trial.subject(inputs).logits for _ in range(2))
    if not torch.isfinite(first).all():
        share = float((~torch.isfinite(first)).double().mean())
        return broken(f"{share:.1%} of the logits are not finite", None, 0.0)
    apart = float((first - second).abs().max())
    if apart:
        return broken("not deterministic: the same call twice, equally seeded, differs", apart, 0.0)
    return kept("the same call twice gives the same bits", 0.0, 0.0)
