"""The same input gives the same output: without that, no comparison means anything; and calls leave no trace."""

import torch

from manyformer.check.chunks import in_chunks
from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, failed, passed


@contract("repeatable", "the same input twice, with the same seed, gives the same finite output")
def repeatable(trial: ContractTrial) -> ContractFinding:
    """Two calls with equal random numbers must agree in every bit."""
    inputs = trial.draw(2, trial.length)
    first, second = (trial.subject(inputs).logits for _ in range(2))
    if not torch.isfinite(first).all():
        share = float((~torch.isfinite(first)).double().mean())
        return failed(f"{share:.1%} of the logits are not finite", None, 0.0)
    apart = float((first - second).abs().max())
    if apart:
        return failed("not deterministic: the same call twice, equally seeded, differs", apart, 0.0)
    return passed("the same call twice gives the same bits", 0.0, 0.0)


@contract("traceless", "calls leave no trace in the model")
def traceless(trial: ContractTrial) -> ContractFinding:
    """A long row, a short one and, where there is a state, a few steps; then the long one must give the same bits."""
    inputs = trial.draw(1, trial.long_length)
    first = trial.subject(inputs).logits
    short = trial.draw(1, trial.round_length(max(trial.long_length // 8, 4)))
    trial.subject(short)
    if not {"incremental_decoding", "per_token"} & trial.subject.not_promised.keys():
        in_chunks(trial, short, [short.tokens.shape[1] - 1, 1])
    apart = float((trial.subject(inputs).logits - first).abs().max())
    if apart:
        told = f"a call with {short.tokens.shape[1]} tokens changes what {trial.long_length} tokens give"
        return failed(told, apart, 0.0)
    return passed("short calls and steps between leave a long call as it was", 0.0, 0.0)
