"""Keys and values of halted tokens, to which running tokens attend."""

from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.attention.attention import AttentionState
from manyformer.core import Context, State, TokenPositions
from manyformer.depth.token_subset import TokenSubset, flatten_chosen
from manyformer.depth.universal import UniversalBlock
from manyformer.position import PositionStepSignal
from manyformer.sources import HaltedKV, HaltedTokenSource


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
        return k + key, v + value

    def _project(self, x: Float[Tensor, "1 n d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        return self.attention.project_kv(x if self.branch.pre_norm is None else self.branch.pre_norm(x), positions)
