"""Rows that hold nothing but padding do no harm."""

import torch

from manyformer.check.contract import contract
from manyformer.check.subject import Inputs
from manyformer.check.trial import Finding, Trial, broken, kept
from manyformer.core import PADDING


@contract("empty-rows", "rows of nothing but padding are finite, gradients too", needs=("padding",))
def empty_rows(trial: Trial) -> Finding:
    """One row empty, one padded on the left, one whole; for an encoder-decoder also a row without a source."""
    inputs = trial.draw(4, trial.length)
    segments = torch.zeros_like(inputs.tokens)
    segments[0], segments[1, : trial.length // 2] = PADDING, PADDING
    inputs = inputs._replace(segments=segments)
    if inputs.source is not None:
        inputs = inputs._replace(source_segments=torch.zeros_like(inputs.source))
        assert inputs.source_segments is not None
        inputs.source_segments[0], inputs.source_segments[2] = PADDING, PADDING
    if bad := _harm(trial, inputs):
        return broken(bad)
    return kept("an empty row gives finite logits, and finite gradients everywhere")


def _harm(trial: Trial, inputs: Inputs) -> str | None:
    """What is not finite, if anything."""
    module = trial.subject.module
    with torch.enable_grad():
        logits = trial.subject(inputs).logits
        if not torch.isfinite(logits).all():
            rows = (~torch.isfinite(logits)).flatten(1).any(1).nonzero().flatten().tolist()
            return f"logits of rows {rows} are not finite; row 0 is empty, row 1 begins with padding"
        if module is None or not logits.requires_grad:
            return None
        weights = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
        grads = torch.autograd.grad(logits.float().square().sum(), list(weights.values()), allow_unused=True)
    for name, grad in zip(weights, grads):
        if grad is not None and not torch.isfinite(grad).all():
            return f"the gradient of {name} is not finite"
    return None
