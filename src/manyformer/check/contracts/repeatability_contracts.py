"""The contracts that equal inputs give equal outputs, which all comparisons need, and that calls change no state."""

import torch

from manyformer.check.trial import ContractFinding, ContractTrial, contract, failed, passed


@contract("repeatable", "the same input twice, with the same seed, gives the same finite output")
def repeatable(trial: ContractTrial) -> ContractFinding:
    """Compare two calls with the same seed, which must agree in every bit."""
    inputs = trial.draw(2, trial.length)
    first, second = (trial.subject(inputs).logits for _ in range(2))
    if not torch.isfinite(first).all():
        share = float((~torch.isfinite(first)).float().mean())
        return failed(f"{share:.1%} of the logits are not finite", None, 0.0)
    difference = float((first - second).abs().max())
    if difference:
        return failed("not deterministic: two calls with the same input and seed differ", difference, 0.0)
    return passed("the same call twice gives the same bits", 0.0, 0.0)


@contract("traceless", "calls leave no trace in the model")
def traceless(trial: ContractTrial) -> ContractFinding:
    """Repeat a long call after a short one and a few decoding steps: it must agree with the first in every bit."""
    inputs = trial.draw(1, trial.long_length)
    first = trial.subject(inputs).logits
    short = trial.draw(1, trial.round_length(max(trial.long_length // 8, 4)))
    trial.subject(short)
    if not {"incremental_decoding", "per_token"} & trial.subject.not_promised.keys():
        trial.run_in_chunks(short, [short.tokens.shape[1] - 1, 1])
    difference = float((trial.subject(inputs).logits - first).abs().max())
    if difference:
        sentence = f"a call with {short.tokens.shape[1]} tokens changes what {trial.long_length} tokens give"
        return failed(sentence, difference, 0.0)
    return passed("a long call gives the same bits after short calls and steps", 0.0, 0.0)
