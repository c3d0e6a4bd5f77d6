"""Keys and values from the stream and from what is given beside it, in front."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, State
from manyformer.sources.kv_source import KeysValues, KVSource, ProjectKV
from manyformer.sources.segment_memory import join_positions


@final
class PrefixSource(KVSource):
    """The stream's own tokens after those in `ctx.memory`, where there are any; somebody else remembers them."""

    def forward(
        self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State, *, folds: bool
    ) -> KeysValues:
        if ctx.memory is None or not ctx.memory.y.shape[1]:
            return KeysValues(*project(x, ctx.positions), ctx.positions, state)
        y, before = ctx.memory
        place = join_positions(before.position_ids, before.segment_ids, ctx.positions)
        return KeysValues(*project(torch.cat([y.to(x.dtype), x], 1), place), place, state)
