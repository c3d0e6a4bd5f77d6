"""The contract that rows of padding alone give finite outputs and gradients."""

import torch

from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, failed, gradients_of, passed
from manyformer.core import PADDING_SEGMENT
from manyformer.tasks import Inputs


@contract("empty-rows", "rows of padding alone are finite, gradients too", needs=("padding_invariant",))
def empty_rows(trial: ContractTrial) -> ContractFinding:
    """One empty row, one padded on the left and two full ones; in an encoder-decoder one has an empty source."""
    inputs = trial.draw(4, trial.length)
    segments = torch.zeros_like(inputs.tokens)
    segments[0], segments[1, : trial.length // 2] = PADDING_SEGMENT, PADDING_SEGMENT
    inputs = inputs._replace(segments=segments)
    if inputs.source is not None:
        inputs = inputs._replace(source_segments=torch.zeros_like(inputs.source))
        assert inputs.source_segments is not None
        inputs.source_segments[0], inputs.source_segments[2] = PADDING_SEGMENT, PADDING_SEGMENT
    if problem := _find_non_finite(trial, inputs):
        return failed(problem)
    return passed("an empty row gives finite logits, and finite gradients everywhere")


def _find_non_finite(trial: ContractTrial, inputs: Inputs) -> str | None:
    """A sentence about the logits or gradients that are not finite, or None."""
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
