"""Forward passes in chunks, each from the state after the previous chunk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyformer.check.trial import ContractTrial
from manyformer.core import State
from manyformer.tasks import Inputs


def run_in_chunks(
    trial: ContractTrial, inputs: Inputs, sizes: Sequence[int], *, capacity: int | None = None, state: State = None
) -> tuple[Tensor, State]:
    """Run the tokens in chunks of these sizes, from `state` if there is one; returns all logits and the final state."""
    state = trial.subject.init_state(inputs, capacity=capacity) if state is None else state
    start, chunks = 0, []
    for size in sizes:
        result = trial.subject(inputs.columns(start, start + size), state)
        state, start = result.state, start + size
        chunks.append(result.logits)
    return torch.cat(chunks, dim=1), state


def chunk_sizes(trial: ContractTrial, length: int) -> list[list[int]]:
    """Several divisions of `length` tokens into chunks; if the model is not `chunked`, a prompt and single tokens."""
    half = length // 2
    if not trial.subject.chunked:
        return [[half] + [1] * (length - half), [length - 1, 1]]
    threes = [3] * (length // 3) + ([length % 3] if length % 3 else [])
    return [threes, [1, 3, length - 4], [length - 1, 1], [half, length - half]]


def format_sizes(sizes: Sequence[int]) -> str:
    """The chunk sizes as short text."""
    return "+".join(map(str, sizes)) if len(sizes) <= 4 else f"{sizes[0]}+{sizes[1]}+..."
