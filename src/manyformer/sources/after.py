"""Keys and values from the stream and from what is given beside it, in front."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, State
from manyformer.sources.base import Keys, Project, Source
from manyformer.sources.remembered import joined


@final
class After(Source):
    """The stream's own tokens after those in `ctx.memory`, where there are any; somebody else remembers them."""

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: Project, state: State, *, folds: bool) -> Keys:
        if ctx.memory is None or not ctx.memory.y.shape[1]:
            return Keys(*project(x, ctx.place), ctx.place, state)
        y, before = ctx.memory
        place = joined(before.pos, before.seg, ctx.place)
        return Keys(*project(torch.cat([y.to(x.dtype), x], 1), place), place, state)
