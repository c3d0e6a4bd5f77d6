"""Cross-attention: keys and values from another sequence, projected once."""

from typing import NamedTuple, final

from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, State, TokenPositions
from manyformer.sources.kv_source import CacheSpec, KeysValues, KVSource, ProjectKV


class ProjectedMemory(NamedTuple):
    """Keys and values of the encoder's output, None before the first call; empty after it for a recurrent kernel."""

    k: Float[Tensor, "b g s e"] | None = None
    v: Float[Tensor, "b g s f"] | None = None
    recurrent: bool = False


@final
class CrossAttentionSource(KVSource):
    """The sequence in `ctx.memory`, usually an encoder's output (Vaswani et al. 2017, section 3.2.3).

    With a state, its keys and values are projected in the first call and reused in all later calls; a recurrent kernel
    gets them in the first call only. Raises ValueError if `ctx.memory` is None.
    """

    key_origin = "source"

    def init_state(self, spec: CacheSpec) -> State:
        return ProjectedMemory(recurrent=spec.recurrent)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if ctx.memory is None:
            raise ValueError("cross-attention needs a sequence to attend to, but ctx.memory is None")
        y, positions = ctx.memory
        if state is None:
            return KeysValues(*project(y, positions), positions)
        if state.k is None:
            k, v = project(y, positions)
            if state.recurrent:
                cached = (k[:, :, :0].clone(), v[:, :, :0].clone())
            else:
                cached = (k, v)
            return KeysValues(k, v, positions, ProjectedMemory(*cached, state.recurrent))
        if state.recurrent:
            # the state of the kernel already contains these keys
            positions = TokenPositions(positions.position_ids[:, :0], positions.segment_ids[:, :0])
        return KeysValues(state.k, state.v, positions, state)
