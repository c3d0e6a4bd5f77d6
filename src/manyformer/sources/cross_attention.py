"""Cross-attention: keys and values from another sequence, projected once."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, State, TokenPositions
from manyformer.sources.kv_source import KeysValues, KVShape, KVSource, ProjectKV


class ProjectedMemory(NamedTuple):
    """Keys and values of the encoder's output; None until the first call has made them."""

    k: Float[Tensor, "b g s e"] | None = None
    v: Float[Tensor, "b g s f"] | None = None


@final
class CrossAttentionSource(KVSource):
    """The sequence in `ctx.memory`, usually an encoder's output (Vaswani et al. 2017, section 3.2.3).

    With a state, its keys and values are projected in the first call and reused in every later one; a kernel that
    folds them gets them once. Raises ValueError where the call brings no memory.
    """

    def init_state(
        self, batch: int, shape: KVShape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        return ProjectedMemory()

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, folds: bool
    ) -> KeysValues:
        if ctx.memory is None:
            raise ValueError("cross-attention needs a memory to attend to, but the call brings none")
        if state is None:
            return KeysValues(*project(ctx.memory.y, ctx.memory.positions), ctx.memory.positions)
        place = ctx.memory.positions
        if state.k is None:
            k, v = project(ctx.memory.y, place)
            return KeysValues(
                k,
                v,
                place,
                ProjectedMemory(k[:, :, :0].clone(), v[:, :, :0].clone()) if folds else ProjectedMemory(k, v),
            )
        if folds:
            # the kernel has them: each key is given once
            place = TokenPositions(place.position_ids[:, :0], place.segment_ids[:, :0])
        return KeysValues(state.k, state.v, place, state)
