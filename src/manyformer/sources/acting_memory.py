"""A segment memory while a model takes one step after another: keys and values are projected once."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import State, TokenPositions
from manyformer.sources.kv_source import ProjectKV
from manyformer.sources.segment_memory import RememberedInputs, join_positions

MIN_STEPS = 128
"""The number of steps, or that of the memory if it is larger, after which keys and values move to new buffers."""


class RememberedStep(NamedTuple):
    """The input of a layer at one step, and its positions."""

    x: Float[Tensor, "b 1 d"]
    positions: TokenPositions


class ActingMemory(NamedTuple):
    """`RememberedInputs`, the steps since then, and keys and values of both in a buffer that is written in place.

    The columns `start` to `stop` are in use; `keys` and `values` are views of the buffer. The head axis comes first,
    because vectors of distances belong to a head. `steps` is shared by successive states, each of which has the first
    `num_steps`."""

    buffer: Float[Tensor, "kv h b capacity e"]
    keys: Float[Tensor, "hb capacity e"]
    values: Float[Tensor, "hb capacity e"]
    remembered: RememberedInputs
    steps: list[RememberedStep]
    num_steps: int
    start: int
    stop: int

    def inputs(self) -> RememberedInputs:
        """The last inputs of the layer, as many as columns are in use."""
        steps, length = self.steps[: self.num_steps], self.stop - self.start
        x = torch.cat([self.remembered.x, *(step.x for step in steps)], 1)
        position_ids = torch.cat([self.remembered.position_ids, *(step.positions.position_ids for step in steps)], 1)
        segment_ids = torch.cat([self.remembered.segment_ids, *(step.positions.segment_ids for step in steps)], 1)
        return RememberedInputs(*(part[:, part.shape[1] - length :] for part in (x, position_ids, segment_ids)))

    def append(self, step: RememberedStep, keys_values: Float[Tensor, "kv h b e"]) -> "ActingMemory":
        """The memory with one more step, which earlier states do not see."""
        memory = self
        if self.stop == self.buffer.shape[3]:
            length = self.stop - self.start
            memory = memory_of_columns(self.buffer.narrow(3, self.start, length), self.inputs(), length)
        memory.buffer.select(3, memory.stop).copy_(keys_values)
        del memory.steps[memory.num_steps :]
        memory.steps.append(step)
        return memory._replace(num_steps=memory.num_steps + 1, stop=memory.stop + 1)


def memory_of_columns(columns: Float[Tensor, "kv h b n e"], remembered: RememberedInputs, size: int) -> ActingMemory:
    """A new memory of at most `size` inputs, with these keys and values, and room for further steps."""
    *sizes, length, width = columns.shape
    buffer = columns.new_empty(*sizes, size + max(size, MIN_STEPS), width)
    buffer.narrow(3, 0, length).copy_(columns)
    keys, values = buffer.flatten(1, 2).unbind()
    return ActingMemory(buffer, keys, values, remembered, [], 0, 0, length)


def begin_acting(
    remembered: RememberedInputs, positions: TokenPositions, project: ProjectKV, size: int
) -> ActingMemory:
    """The memory of these inputs, projected by the current weights, for steps with such positions."""
    length = remembered.x.shape[1]
    keys_values = project(remembered.x, join_positions(*remembered[1:], positions).columns(0, length))
    return memory_of_columns(torch.stack(keys_values).transpose(1, 2), remembered, size)


def end_acting(state: State) -> State:
    """The state with the inputs of each layer in place of its memory while acting."""
    if isinstance(state, ActingMemory):
        return state.inputs()
    if isinstance(state, list | tuple):
        children = [end_acting(child) for child in state]
        return type(state)(*children) if hasattr(state, "_fields") else type(state)(children)
    return state
