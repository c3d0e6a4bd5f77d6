"""Rows that hold nothing but padding do no harm."""

import torch

from manyformer.check.contract import contract
from manyformer.check.subject import Inputs
from manyformer.check.trial import ContractFinding, ContractTrial, failed, gradients_of, passed
from manyformer.core import PADDING_SEGMENT


@contract("empty-rows", "rows of nothing but padding are finite, gradients too", needs=("padding_invariant",))
def empty_rows(trial: ContractTrial) -> ContractFinding:
    """One row empty, one padded on the left, one whole; for an encoder-decoder also a row without a source."""
    inputs = trial.draw(4, trial.length)
    segments = torch.zeros_like(inputs.tokens)
    segments[0], segments[1, : trial.length // 2] = PADDING_SEGMENT, PADDING_SEGMENT
    inputs = inputs._replace(segments=segments)
    if inputs.source is not None:
        inputs = inputs._replace(source_segments=torch.zeros_like(inputs.source))
        assert inputs.source_segments is not None
        inputs.source_segments[0], inputs.source_segments[2] = PADDING_SEGMENT, PADDING_SEGMENT
    if bad := _harm(trial, inputs):
        return failed(bad)
    return passed("an empty row gives finite logits, and finite gradients everywhere")


def _harm(trial: ContractTrial, inputs: Inputs) -> str | None:
    """What is not finite, if anything."""
    logits = trial.subject(inputs).logits
    if not torch.isfinite(logits).all():
        rows = (~torch.isfinite(logits)).flatten(1).any(1).nonzero().flatten().tolist()
        return f"logits of rows {rows} are not finite; row 0 is empty, row 1 begins with padding"
    if trial.subject.module is None:
        return None
    grads = gradients_of(trial, lambda: trial.subject(inputs).logits.float().square().sum())
    for name, grad in grads.items():
        if grad is not None and not torch.isfinite(grad).all():
            return f"the gradient of {name} is not finite"
    return None
