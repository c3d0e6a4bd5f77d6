"""Keys and values of a prefix (`ctx.memory`) followed by those of the layer's own input."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, State
from manyformer.sources.kv_source import KeysValues, KVSource, ProjectKV
from manyformer.sources.segment_memory import join_positions


@final
class PrefixSource(KVSource):
    """The tokens of `ctx.memory`, if any, followed by the layer's input; the caller keeps the prefix."""

    needs_heads = True

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: ProjectKV, state: State) -> KeysValues:
        if ctx.memory is None or not ctx.memory.y.shape[1]:
            return KeysValues(*project(x, ctx.positions), ctx.positions, state)
        y, prefix = ctx.memory
        positions = join_positions(prefix.position_ids, prefix.segment_ids, ctx.positions)
        return KeysValues(*project(torch.cat([y.to(x.dtype), x], 1), positions), positions, state)
