"""The contracts that decoding from a state gives the same outputs as one pass over all tokens."""

import torch

from manyformer.check.chunks import chunk_sizes, format_sizes, run_in_chunks
from manyformer.check.contract import contract
from manyformer.check.trial import ContractFinding, ContractTrial, WorstDifference

NEEDS = ("incremental_decoding", "per_token")


@contract("cached", "token by token from a state == one pass", needs=NEEDS, exact=True)
def cached(trial: ContractTrial) -> ContractFinding:
    """Compare steps of one token from the initial state with one pass."""
    inputs, worst = trial.draw(2, trial.length), WorstDifference()
    full = trial.subject(inputs).logits
    steps, _ = run_in_chunks(trial, inputs, [1] * trial.length)
    for column in range(trial.length):
        worst.add(steps[:, column], full[:, column], f"step by step, token {column}")
    return worst.finding(f"{trial.length} single steps give the same as one pass", trial.tolerance)


@contract("prefill", "in chunks from a state == one pass", needs=NEEDS, exact=True)
def prefill(trial: ContractTrial) -> ContractFinding:
    """Compare chunks of several sizes with one pass."""
    inputs, worst = trial.draw(2, trial.length), WorstDifference()
    full = trial.subject(inputs).logits
    chunkings = chunk_sizes(trial, trial.length)
    for sizes in chunkings:
        worst.add(run_in_chunks(trial, inputs, sizes)[0], full, f"in chunks of {format_sizes(sizes)}")
    return worst.finding(
        f"{'; '.join(map(format_sizes, chunkings))} tokens at a time give the same as one pass", trial.tolerance
    )


@contract("preallocated", "a preallocated state == one pass", needs=(*NEEDS, "capacity"), exact=True)
def preallocated(trial: ContractTrial) -> ContractFinding:
    """Compare states with exactly enough and with more capacity, fed a chunk and then single tokens, with one pass."""
    inputs, worst = trial.draw(2, trial.length), WorstDifference()
    full = trial.subject(inputs).logits
    half = trial.length // 2
    for capacity in (trial.length, trial.length + 7):
        actual, _ = run_in_chunks(trial, inputs, [half] + [1] * (trial.length - half), capacity=capacity)
        worst.add(actual, full, f"with a capacity of {capacity} tokens")
    return worst.finding("preallocated states give the same as one pass", trial.tolerance)


@contract("rewind", "a state can be continued twice", needs=(*NEEDS, "rewind"), exact=True)
def rewind(trial: ContractTrial) -> ContractFinding:
    """Continue one state with two different texts, then with the first again: decoding must not change the state."""
    half, worst = trial.length // 2, WorstDifference()
    first = trial.draw(2, trial.length)
    second = first._replace(
        tokens=torch.cat([first.tokens[:, :half], trial.different_tokens(first.tokens[:, half:])], dim=1)
    )
    _, state = run_in_chunks(trial, first, [half])
    for inputs, where in ((first, "first"), (second, "second"), (first, "first again")):
        actual = trial.subject(inputs.columns(half, trial.length), state).logits
        worst.add(actual, trial.subject(inputs).logits[:, half:], f"the {where} continuation of one state")
    return worst.finding("two continuations of one state, each as in one pass", trial.tolerance)
