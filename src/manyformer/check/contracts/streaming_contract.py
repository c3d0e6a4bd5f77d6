"""Going on from a state gives what one pass over everything gives."""

import torch

from manyformer.check.chunks import chunkings, format_sizes, in_chunks
from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference

NEEDS = ("incremental_decoding", "per_token")


@contract("cached", "token by token from a state == one pass", needs=NEEDS, exact=True)
def cached(trial: ContractTrial) -> ContractFinding:
    """Steps of one token from the empty state on."""
    inputs, worst = trial.draw(2, trial.length), WorstDifference()
    full = trial.subject(inputs).logits
    steps, _ = in_chunks(trial, inputs, [1] * trial.length)
    for column in range(trial.length):
        worst.add(steps[:, column], full[:, column], f"step by step, token {column}")
    return worst.finding(f"{trial.length} single steps give what one pass gives", trial.tolerance)


@contract("prefill", "in chunks from a state == one pass", needs=NEEDS, exact=True)
def prefill(trial: ContractTrial) -> ContractFinding:
    """Chunks of several sizes."""
    inputs, worst = trial.draw(2, trial.length), WorstDifference()
    full = trial.subject(inputs).logits
    ways = chunkings(trial, trial.length)
    for sizes in ways:
        worst.add(in_chunks(trial, inputs, sizes)[0], full, f"in chunks of {format_sizes(sizes)}")
    return worst.finding(
        f"{'; '.join(map(format_sizes, ways))} tokens at a time give what one pass gives", trial.tolerance
    )


@contract("preallocated", "a state with reserved room == one pass", needs=(*NEEDS, "capacity"), exact=True)
def preallocated(trial: ContractTrial) -> ContractFinding:
    """Room for exactly the tokens to come, and for more; a chunk first, then single tokens."""
    inputs, worst = trial.draw(2, trial.length), WorstDifference()
    full = trial.subject(inputs).logits
    half = trial.length // 2
    for capacity in (trial.length, trial.length + 7):
        got, _ = in_chunks(trial, inputs, [half] + [1] * (trial.length - half), capacity=capacity)
        worst.add(got, full, f"with room for {capacity} tokens")
    return worst.finding("states with reserved room give what one pass gives", trial.tolerance)


@contract("rewind", "a state can be gone on from twice", needs=(*NEEDS, "rewind"), exact=True)
def rewind(trial: ContractTrial) -> ContractFinding:
    """Going on from a state must not change it: two futures of one past, then the first again."""
    half, worst = trial.length // 2, WorstDifference()
    one = trial.draw(2, trial.length)
    two = one._replace(tokens=torch.cat([one.tokens[:, :half], trial.different_tokens(one.tokens[:, half:])], dim=1))
    _, state = in_chunks(trial, one, [half])
    for inputs, where in ((one, "first"), (two, "second"), (one, "first again")):
        got = trial.subject(inputs.columns(half, trial.length), state).logits
        worst.add(got, trial.subject(inputs).logits[:, half:], f"the {where} future of a kept state")
    return worst.finding("two futures from one kept state, each as in one pass", trial.tolerance)
