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
    """`RememberedInputs`, the steps since then, and keys and values of both in buffers that are written in place.

    The columns `start` to `stop` are in use. Keys have the head axis first and the token axis last, as the product with
    one query per row needs them. `steps` is shared by successive states, each of which has the first `num_steps`."""

    k: Float[Tensor, "h b e capacity"]
    v: Float[Tensor, "h b capacity f"]
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

    def append(self, step: RememberedStep, k: Float[Tensor, "h b e"], v: Float[Tensor, "h b f"]) -> "ActingMemory":
        """The memory with one more step, which earlier states do not see."""
        memory = self if self.stop < self.k.shape[3] else self._move()
        memory.k.select(3, memory.stop).copy_(k)
        memory.v.select(2, memory.stop).copy_(v)
        del memory.steps[memory.num_steps :]
        memory.steps.append(step)
        return memory._replace(num_steps=memory.num_steps + 1, stop=memory.stop + 1)

    def _move(self) -> "ActingMemory":
        """The same memory at the beginning of new buffers."""
        length, capacity = self.stop - self.start, self.k.shape[3]
        k, v = torch.empty_like(self.k), torch.empty_like(self.v)
        k.narrow(3, 0, length).copy_(self.k.narrow(3, self.start, length))
        v.narrow(2, 0, length).copy_(self.v.narrow(2, self.start, length))
        assert length < capacity
        return ActingMemory(k, v, self.inputs(), [], 0, 0, length)


def begin_acting(
    remembered: RememberedInputs, positions: TokenPositions, project: ProjectKV, size: int
) -> ActingMemory:
    """The memory of these inputs, projected by the current weights, for steps with such positions."""
    length = remembered.x.shape[1]
    k, v = project(remembered.x, join_positions(*remembered[1:], positions).columns(0, length))
    batch, heads, _, key_dim = k.shape
    capacity = size + max(size, MIN_STEPS)
    keys = k.new_empty(heads, batch, key_dim, capacity)
    values = v.new_empty(heads, batch, capacity, v.shape[3])
    keys.narrow(3, 0, length).copy_(k.permute(1, 0, 3, 2))
    values.narrow(2, 0, length).copy_(v.transpose(0, 1))
    return ActingMemory(keys, values, remembered, [], 0, 0, length)


def end_acting(state: State) -> State:
    """The state with the inputs of each layer in place of its memory while acting."""
    if isinstance(state, ActingMemory):
        return state.inputs()
    if isinstance(state, list | tuple):
        children = [end_acting(child) for child in state]
        return type(state)(*children) if hasattr(state, "_fields") else type(state)(children)
    return state
