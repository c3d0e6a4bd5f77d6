"""Cross-attention: keys and values from another sequence, projected once."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, ContiguousLayout, MemorySequence, State, TokenPositions
from manyformer.masks import AllKeys, Mask
from manyformer.sources.kv_source import KeysValues, KVShape, KVSource, ProjectKV, ReadMemory, StoredKeys


class ProjectedMemory(NamedTuple):
    """Keys and values of the encoder's output; None before the first call."""

    k: Float[Tensor, "b g s e"] | None = None
    v: Float[Tensor, "b g s f"] | None = None


@final
class CrossAttentionSource(KVSource):
    """The sequence in `ctx.memory`, usually an encoder's output (Vaswani et al. 2017, section 3.2.3).

    With a state, its keys and values are projected in the first call and reused in all later calls; a recurrent kernel
    gets them in the first call only. Raises ValueError if `ctx.memory` is None.
    """

    def init_state(
        self,
        batch: int,
        shape: KVShape,
        *,
        recurrent: bool,
        capacity: int | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> State:
        return ProjectedMemory()

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, recurrent: bool
    ) -> KeysValues:
        if ctx.memory is None:
            raise ValueError("cross-attention needs a sequence to attend to, but ctx.memory is None")
        if state is None:
            return KeysValues(*project(ctx.memory.y, ctx.memory.positions), ctx.memory.positions)
        positions = ctx.memory.positions
        if state.k is None:
            k, v = project(ctx.memory.y, positions)
            return KeysValues(
                k,
                v,
                positions,
                ProjectedMemory(k[:, :, :0].clone(), v[:, :, :0].clone()) if recurrent else ProjectedMemory(k, v),
            )
        if recurrent:
            # the state of the kernel already contains these keys
            positions = TokenPositions(positions.position_ids[:, :0], positions.segment_ids[:, :0])
        return KeysValues(state.k, state.v, positions, state)

    def decode_memory(self, mask: Mask | None) -> ReadMemory | None:
        return _read_memory if mask == AllKeys() else None


def _read_memory(memory: MemorySequence, project: ProjectKV, state: ProjectedMemory) -> StoredKeys:
    """The keys of the first document of each row, projected at the first call."""
    positions = memory.positions
    if state.k is None or state.v is None:
        state = ProjectedMemory(*project(memory.y, positions))
    visible = None if isinstance(positions.layout, ContiguousLayout) else (positions.segment_ids == 0)[:, None, None]
    assert state.k is not None
    assert state.v is not None
    return StoredKeys(state.k, state.v, visible, state)
