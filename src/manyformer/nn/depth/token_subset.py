"""Subsets of the tokens of a stream: gathered into shorter rows for a computation, and scattered back.

Tokens that are not computed any more keep their keys and values (`HaltedKVStore`), to which the others attend.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.nn.attention.attention import AttentionState
from manyformer.nn.attention.kv_cache.kv_source import HaltedKV, HaltedTokenSource
from manyformer.nn.core import PADDING_SEGMENT, Context, MemorySequence, State, TokenPositions, tree_map
from manyformer.nn.depth.universal import UniversalBlock
from manyformer.nn.positions.step_signal import PositionStepSignal


class TokenGroup(ABC):
    """The tokens that a step computes, with their `positions`."""

    positions: TokenPositions

    @abstractmethod
    def gather(self, x: Tensor) -> Tensor:
        """The rows of `x` (b, l, ...) for the tokens of the group, (r, n, ...)."""

    @abstractmethod
    def scatter(self, target: Tensor, values: Tensor) -> Tensor:
        """`target` (b, l, ...) with the `values` (r, n, ...) of the group's tokens."""

    @abstractmethod
    def select_rows(self, state: State) -> State:
        """The rows of a tree of tensors that contain tokens of the group."""

    def context(self, ctx: Context) -> Context:
        """The context of a call with only the tokens of the group."""
        memory = None
        if ctx.memory is not None:
            memory = self._select_memory(ctx.memory)
        return Context(self.positions, memory, ctx.watch)

    def _select_memory(self, memory: MemorySequence) -> MemorySequence:
        positions = self.select_rows(memory.positions._replace(layout=None))
        return MemorySequence(self.select_rows(memory.y), positions)


@final
class AllTokens(TokenGroup):
    """All tokens; `scatter` writes only those of the mask `changing`, None for all."""

    def __init__(self, positions: TokenPositions, changing: Bool[Tensor, "b l"] | None = None) -> None:
        self.positions = positions
        self.changing = changing

    def gather(self, x: Tensor) -> Tensor:
        return x

    def scatter(self, target: Tensor, values: Tensor) -> Tensor:
        if self.changing is None:
            return values
        changing = self.changing.view(*self.changing.shape, *(1 for _ in target.shape[2:]))
        return torch.where(changing, values, target)

    def select_rows(self, state: State) -> State:
        return state

    def context(self, ctx: Context) -> Context:
        return ctx


@final
class TokenSubset(TokenGroup):
    """The tokens of the mask `chosen`, packed to the left in the rows that have any; empty columns are padding.

    `token_index` and `packed_index` are the flat indices of the tokens in the stream and in the packed rows;
    `row_index` are the indices of the rows."""

    def __init__(self, positions: TokenPositions, chosen: Bool[Tensor, "b l"]) -> None:
        self.chosen = chosen
        self.row_index = chosen.any(1).nonzero()[:, 0]
        chosen_rows = chosen[self.row_index]
        # the place of each chosen token among those of its row
        column = chosen_rows.cumsum(1) - 1
        self.width = int(column.max()) + 1
        self.token_index = chosen.flatten().nonzero()[:, 0]
        # rows without a chosen token are left out altogether
        row_starts = torch.arange(len(self.row_index), device=chosen.device)[:, None] * self.width
        self.packed_index = (row_starts + column)[chosen_rows]
        fields = [
            None if x is None else self.gather(x.expand(chosen.shape))
            for x in (positions.position_ids, positions.roles, positions.part_ids, positions.token_ids)
        ]
        tree = None
        if positions.tree is not None:
            tree = type(positions.tree)(*(self.gather(x) for x in positions.tree))
        # empty columns become padding
        segment_ids = self.gather(positions.segment_ids.expand(chosen.shape) - PADDING_SEGMENT) + PADDING_SEGMENT
        assert fields[0] is not None
        self.positions = TokenPositions(fields[0], segment_ids, None, tree, fields[1], fields[2], token_ids=fields[3])

    def gather(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)[self.token_index]
        empty = x.new_zeros(len(self.row_index) * self.width, *x.shape[2:])
        return empty.index_copy(0, self.packed_index, tokens).view(len(self.row_index), self.width, *x.shape[2:])

    def scatter(self, target: Tensor, values: Tensor) -> Tensor:
        # without the empty columns, whose values mean nothing
        tokens = values.flatten(0, 1)[self.packed_index]
        return target.flatten(0, 1).index_copy(0, self.token_index, tokens.to(target.dtype)).view(target.shape)

    def select_rows(self, state: State) -> State:
        if len(self.row_index) == len(self.chosen):
            return state
        return tree_map(lambda x: x[self.row_index], state)


def flatten_chosen(
    x: Float[Tensor, "b l d"], positions: TokenPositions, chosen: Bool[Tensor, "b l"]
) -> tuple[Tensor, TokenPositions, Tensor]:
    """The chosen tokens concatenated to one row (1, n, d), their positions, and their flat indices in the stream."""
    token_index = chosen.flatten().nonzero()[:, 0]
    position_ids = positions.position_ids.expand(chosen.shape).flatten()[token_index][None]
    return x.flatten(0, 1)[token_index][None], TokenPositions(position_ids, torch.zeros_like(position_ids)), token_index


@final
class HaltedKVStore:
    """Caches the keys and values of the tokens of one call that have halted, with the signals of the current step.

    If the branch has no norm before its projections, they are projected once, when a token halts, and shifted by the
    projection of the step signal; `unprojected` is the mask of the tokens that are not in the cache yet.
    """

    def __init__(
        self, block: UniversalBlock, timing: PositionStepSignal, positions: TokenPositions, valid: Bool[Tensor, "b l"]
    ) -> None:
        self.branch = block.attention
        self.attention = block.inner_attention
        self.timing = timing
        self.positions = positions
        self.unprojected = self.valid = valid
        # projections that are linear in the stream can be shifted
        bare = self.branch.pre_norm is None and self.attention.pre_norm is None
        self.can_shift = bare and not self.attention.position.required_seams()
        self.cached: list[Tensor] | None = None

    def state_for_group(
        self, attention_state: State, states: Float[Tensor, "b l d"], group: TokenSubset, step: int
    ) -> AttentionState:
        """The attention state for the tokens in `group`, which includes the keys and values of halted tokens."""
        source_state, kernel_state = (None, ()) if attention_state is None else attention_state[:2]
        k, v = self._keys_values_at(states, ~group.chosen, step)
        indices = group.token_index, group.packed_index, group.row_index
        return AttentionState(HaltedKV(source_state, k, v, self.positions, *indices), kernel_state)

    def update_state(
        self, attention_state: AttentionState, states: Float[Tensor, "b l d"], ctx: Context, step: int
    ) -> AttentionState:
        """The attention state after a step for which all tokens have halted."""
        k, v = self._keys_values_at(states, torch.ones_like(self.unprojected), step)
        source = self.attention.source
        assert isinstance(source, HaltedTokenSource)
        source_state = source.update_cache(states, ctx, k, v, attention_state.source).state
        return AttentionState(source_state, attention_state.kernel)

    def _keys_values_at(
        self, states: Float[Tensor, "b l d"], halted: Bool[Tensor, "b l"], step: int
    ) -> tuple[Float[Tensor, "b g l e"], Float[Tensor, "b g l f"]]:
        # keys that cannot be shifted are projected again at every step, with its signal
        newly_halted = halted & (self.unprojected if self.can_shift else self.valid)
        step_vector = self.timing.steps(step).to(states.dtype)
        # both projections contain the biases, which cancel in the difference
        zero_ids = self.positions.position_ids.new_zeros(1, 2)
        step_and_zero = torch.stack([step_vector, torch.zeros_like(step_vector)])[None]
        step_keys_values = self._project(step_and_zero, TokenPositions(zero_ids, zero_ids))
        if self.cached is None:
            batch, length = halted.shape
            self.cached = [x.new_zeros(batch * length, x.shape[1], x.shape[3]) for x in step_keys_values]
        if bool(newly_halted.any()):
            x, positions, token_index = flatten_chosen(states, self.positions, newly_halted)
            x = self.timing.position.embed(x, positions)
            projected = self._project(x if self.can_shift else x + step_vector, positions)
            fields = zip(self.cached, projected)
            self.cached = [cached.index_copy(0, token_index, new[0].transpose(0, 1)) for cached, new in fields]
            self.unprojected = self.unprojected & ~newly_halted
        k, v = (x.view(*halted.shape, *x.shape[1:]).transpose(1, 2) for x in self.cached)
        if not self.can_shift:
            return k, v
        key, value = (x[:, :, :1] - x[:, :, 1:] for x in step_keys_values)
        # projections are linear: the signal of the step is added to keys and values instead of to the stream
        return k + key, v + value

    def _project(self, x: Float[Tensor, "1 n d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        return self.attention.project_kv(x if self.branch.pre_norm is None else self.branch.pre_norm(x), positions)
