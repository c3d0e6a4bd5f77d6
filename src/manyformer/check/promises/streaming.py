"""Going on from a state gives what one pass over everything gives."""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyformer.check.contract import contract
from manyformer.check.subject import Inputs
from manyformer.check.trial import Finding, Trial, Worst
from manyformer.core import State

NEEDS = ("streams", "tokenwise")


def in_chunks(
    trial: Trial, inputs: Inputs, sizes: Sequence[int], *, capacity: int | None = None
) -> tuple[Tensor, State]:
    """The logits of all tokens, taken in chunks of these sizes, and the state at the end."""
    state, begin, parts = trial.subject.start(inputs, capacity=capacity), 0, []
    for size in sizes:
        result = trial.subject(inputs.columns(begin, begin + size), state)
        state, begin = result.state, begin + size
        parts.append(result.logits)
    return torch.cat(parts, dim=1), state


def chunkings(trial: Trial, length: int) -> list[list[int]]:
    """Ways to cut a row: threes; one, three, the rest; all but one; halves. Else a prompt and single tokens."""
    half = length // 2
    if not trial.subject.chunked:
        return [[half] + [1] * (length - half), [length - 1, 1]]
    threes = [3] * (length // 3) + ([length % 3] if length % 3 else [])
    return [threes, [1, 3, length - 4], [length - 1, 1], [half, length - half]]


@contract("cached", "token by token from a state == one pass", needs=NEEDS, exact=True)
def cached(trial: Trial) -> Finding:
    """Steps of one token from the empty state on."""
    inputs, worst = trial.draw(2, trial.length), Worst()
    full = trial.subject(inputs).logits
    steps, _ = in_chunks(trial, inputs, [1] * trial.length)
    for column in range(trial.length):
        worst.add(steps[:, column], full[:, column], f"step by step, token {column}")
    return worst.finding(f"{trial.length} single steps give what one pass gives", trial.tolerance)


@contract("prefill", "in chunks from a state == one pass", needs=NEEDS, exact=True)
def prefill(trial: Trial) -> Finding:
    """Chunks of several sizes."""
    inputs, worst = trial.draw(2, trial.length), Worst()
    full = trial.subject(inputs).logits
    ways = chunkings(trial, trial.length)
    for sizes in ways:
        worst.add(in_chunks(trial, inputs, sizes)[0], full, f"in chunks of {_tell(sizes)}")
    return worst.finding(f"{'; '.join(map(_tell, ways))} tokens at a time give what one pass gives", trial.tolerance)


@contract("preallocated", "a state with reserved room == one pass", needs=(*NEEDS, "capacity"), exact=True)
def preallocated(trial: Trial) -> Finding:
    """Room for exactly the tokens to come, and for more; a chunk first, then single tokens."""
    inputs, worst = trial.draw(2, trial.length), Worst()
    full = trial.subject(inputs).logits
    half = trial.length // 2
    for capacity in (trial.length, trial.length + 7):
        got, _ = in_chunks(trial, inputs, [half] + [1] * (trial.length - half), capacity=capacity)
        worst.add(got, full, f"with room for {capacity} tokens")
    return worst.finding("states with reserved room give what one pass gives", trial.tolerance)


@contract("rewind", "a state can be gone on from twice", needs=(*NEEDS, "rewind"), exact=True)
def rewind(trial: Trial) -> Finding:
    """Going on from a state must not change it: two futures of one past, then the first again."""
    half, worst = trial.length // 2, Worst()
    one = trial.draw(2, trial.length)
    two = one._replace(tokens=torch.cat([one.tokens[:, :half], trial.others(one.tokens[:, half:])], dim=1))
    _, state = in_chunks(trial, one, [half])
    for inputs, where in ((one, "first"), (two, "second"), (one, "first again")):
        got = trial.subject(inputs.columns(half, trial.length), state).logits
        worst.add(got, trial.subject(inputs).logits[:, half:], f"the {where} future of a kept state")
    return worst.finding("two futures from one kept state, each as in one pass", trial.tolerance)


def _tell(sizes: Sequence[int]) -> str:
    return "+".join(map(str, sizes)) if len(sizes) <= 4 else f"{sizes[0]}+{sizes[1]}+..."
