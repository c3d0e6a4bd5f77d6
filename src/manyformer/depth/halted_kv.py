"""Keys and values of tokens that stand still while others go on."""

from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.attention import Attention, AttentionState
from manyformer.core import Context, Residual, State, TokenPositions
from manyformer.depth.token_subset import TokenSubset, flatten_chosen
from manyformer.position import PositionStepSignal
from manyformer.sources import HaltedKV, HaltedTokenSource


@final
class HaltedKVStore:
    """Keys and values of the tokens of one call that have halted, as each step asks for them.

    They are those of the token's state with the signals of the step. Where the branch takes the bare stream, they are
    projected once, when a token has halted, and shifted by what the step adds; `left` are the tokens that are not here
    yet.
    """

    def __init__(
        self, branch: Residual, timing: PositionStepSignal, positions: TokenPositions, real: Bool[Tensor, "b l"]
    ) -> None:
        assert isinstance(branch.inner, Attention)
        self.branch, self.attention, self.timing, self.place = branch, branch.inner, timing, positions
        self.left = self.real = real
        # what is linear in the stream can be shifted
        bare = branch.pre_norm is None and self.attention.pre_norm is None
        self.shifts = bare and not self.attention.position.required_seams()
        self.kept: list[Tensor] | None = None

    def beside(self, own: State, states: Float[Tensor, "b l d"], group: TokenSubset, step: int) -> AttentionState:
        """What the attention of the tokens in `group` goes on from."""
        kept, kernel = (None, ()) if own is None else own
        k, v = self._at(states, ~group.chosen, step)
        return AttentionState(
            HaltedKV(kept, k, v, self.place, group.token_index, group.packed_index, group.row), kernel
        )

    def remember(self, own: AttentionState, states: Float[Tensor, "b l d"], ctx: Context, step: int) -> AttentionState:
        """What attention remembers of a step for which all tokens have halted."""
        k, v = self._at(states, torch.ones_like(self.left), step)
        source = self.attention.source
        assert isinstance(source, HaltedTokenSource)
        return AttentionState(source.remember(states, ctx, k, v, own.source).state, own.kernel)

    def _at(
        self, states: Float[Tensor, "b l d"], halted: Bool[Tensor, "b l"], step: int
    ) -> tuple[Float[Tensor, "b g l e"], Float[Tensor, "b g l f"]]:
        fresh = halted & (self.left if self.shifts else self.real)
        row = self.timing.steps(step).to(states.dtype)
        # the biases of the projection are in both, and fall out of the difference
        two = self.place.position_ids.new_zeros(1, 2)
        both = self._project(torch.stack([row, torch.zeros_like(row)])[None], TokenPositions(two, two))
        if self.kept is None:
            batch, length = halted.shape
            self.kept = [x.new_zeros(batch * length, x.shape[1], x.shape[3]) for x in both]
        if bool(fresh.any()):
            x, place, token = flatten_chosen(states, self.place, fresh)
            x = self.timing.position.embed(x, place)
            new = self._project(x if self.shifts else x + row, place)
            self.kept = [old.index_copy(0, token, one[0].transpose(0, 1)) for old, one in zip(self.kept, new)]
            self.left = self.left & ~fresh
        k, v = (x.view(*halted.shape, *x.shape[1:]).transpose(1, 2) for x in self.kept)
        if not self.shifts:
            return k, v
        key, value = (x[:, :, :1] - x[:, :, 1:] for x in both)
        return k + key, v + value

    def _project(self, x: Float[Tensor, "1 n d"], positions: TokenPositions) -> tuple[Tensor, Tensor]:
        return self.attention.project(x if self.branch.pre_norm is None else self.branch.pre_norm(x), positions)
