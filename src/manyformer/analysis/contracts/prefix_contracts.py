"""The contracts that an output follows from the tokens before it alone: not from how many follow, nor from targets."""

from __future__ import annotations

import torch
from torch import Tensor

from manyformer.analysis.contracts.isolation import restoring_attributes, restoring_buffers, training_mode
from manyformer.analysis.contracts.subject import Untestable
from manyformer.analysis.contracts.trial import ContractFinding, ContractTrial, contract, failed, join_numbers, passed
from manyformer.nn.model_inputs import Inputs


@contract(
    "length", "the first tokens give the same alone as with more after them", needs=("causal", "per_token"), exact=True
)
def length(trial: ContractTrial) -> ContractFinding:
    """Compare the first tokens alone, at many lengths, with the same tokens at the beginning of a long sequence.

    Generation without a cache computes each token from a sequence that ends there, training from a long one.
    """
    longest = trial.probe_length or trial.long_length
    inputs = trial.draw(1, longest, source=trial.length)
    expected = trial.subject(inputs).logits
    compared: list[int] = []
    refused: list[int] = []
    for size in _prefix_lengths(trial):
        try:
            actual = trial.subject(inputs.columns(0, size)).logits
        # models raise whatever they like at a length that they do not take
        except Exception:
            refused.append(size)
            continue
        compared.append(size)
        where = f"the outputs of {size} tokens depend on whether {longest - size} more follow"
        trial.compare(actual, expected[:, :size], where)
    if not compared:
        if refused:
            raise Untestable(f"{join_numbers(refused)} tokens raise, {longest} do not")
        raise Untestable(f"the only length is {longest}")
    raising = ""
    if refused:
        raising = f" ({join_numbers(refused)} tokens raise)"
    return trial.finding(f"{join_numbers(compared)} tokens give the same alone as with more after them{raising}")


def _prefix_lengths(trial: ContractTrial) -> list[int]:
    """The least lengths, odd ones, some around powers of two, where blocks meet, and random ones."""
    long = trial.long_length
    middle = 1 << max((long - 1).bit_length() - 1, 1)
    sampled = [1 + trial.random_int(long - 1) for _ in range(2)]
    lengths = [1, 2, 3, 5, 7, 12, 17, 31, 32, 33, middle - 1, middle, middle + 1, long - 1, *sampled]
    longest = long
    if trial.probe_length is not None:
        longest = trial.probe_length
        lengths += [long, long + trial.random_int(longest - long)]
    return sorted(size for size in {trial.round_length(size) for size in lengths} if size < longest)


@contract("targets", "no logit depends on its target, nor on a later one", needs=("targets", "per_token"))
def targets(trial: ContractTrial) -> ContractFinding:
    """Give other targets with the same tokens, in evaluation and in training mode; the logits must be the same.

    Targets of earlier positions are tokens that the model may know, as in teacher forcing.
    """
    module = trial.subject.module
    finding = _exchange_targets(trial)
    if not finding.passed or module is None:
        return finding
    try:
        with training_mode(module):
            in_training = _exchange_targets(trial)
    # two equal calls differ, so that nothing can be compared in this mode
    except Untestable:
        return finding
    if in_training.passed:
        return in_training._replace(sentence=f"{in_training.sentence}, in training mode too")
    return in_training._replace(sentence=f"in training mode, {in_training.sentence}")


def _exchange_targets(trial: ContractTrial) -> ContractFinding:
    module = trial.subject.module
    inputs = trial.draw(2, trial.length)
    given = trial.tokens(2, trial.length)

    def logits(inputs: Inputs, targets: Tensor) -> Tensor:
        if module is None:
            return trial.subject.logits_with_targets(inputs, targets)
        with restoring_buffers(module), restoring_attributes(module):
            return trial.subject.logits_with_targets(inputs, targets)

    expected = logits(inputs, given)
    if not torch.equal(logits(inputs, given), expected):
        raise Untestable("two equal calls differ")
    if torch.equal(logits(inputs, trial.different_tokens(given)), expected):
        return passed("other targets give the same logits", 0.0, 0.0)
    # one target in each row is exchanged
    rows = [0] * trial.length
    inputs = inputs.rows(rows)
    given = given[rows]
    diagonal = torch.eye(trial.length, dtype=torch.bool, device=given.device)
    exchanged = torch.where(diagonal, trial.different_tokens(given), given)
    changes = (logits(inputs, exchanged) - logits(inputs, given)).abs().amax(-1)
    later_targets = torch.ones_like(diagonal).tril()
    leaks = changes * later_targets
    size = float(leaks.max())
    if size == 0 and changes.any():
        return passed("logits depend on targets of earlier positions alone", 0.0, 0.0)
    if size == 0:
        return failed("the targets leak: other targets change the logits, though none does alone", None, 0.0)
    target, output = divmod(int(leaks.argmax()), trial.length)
    sentence = f"the target leaks: exchanging target {target} changes output {output} by {size:.1e}"
    return failed(sentence, size, 0.0)
