"""A row taken in pieces, each going on from the state after the one before."""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyformer.check.subject import Inputs
from manyformer.check.trial import ContractTrial
from manyformer.core import State


def in_chunks(
    trial: ContractTrial, inputs: Inputs, sizes: Sequence[int], *, capacity: int | None = None
) -> tuple[Tensor, State]:
    """The logits of all tokens, taken in chunks of these sizes, and the state at the end."""
    state, begin, parts = trial.subject.init_state(inputs, capacity=capacity), 0, []
    for size in sizes:
        result = trial.subject(inputs.columns(begin, begin + size), state)
        state, begin = result.state, begin + size
        parts.append(result.logits)
    return torch.cat(parts, dim=1), state


def chunkings(trial: ContractTrial, length: int) -> list[list[int]]:
    """Ways to cut a row: threes; one, three, the rest; all but one; halves. Else a prompt and single tokens."""
    half = length // 2
    if not trial.subject.chunked:
        return [[half] + [1] * (length - half), [length - 1, 1]]
    threes = [3] * (length // 3) + ([length % 3] if length % 3 else [])
    return [threes, [1, 3, length - 4], [length - 1, 1], [half, length - half]]


def format_sizes(sizes: Sequence[int]) -> str:
    """The sizes for people."""
    return "+".join(map(str, sizes)) if len(sizes) <= 4 else f"{sizes[0]}+{sizes[1]}+..."
