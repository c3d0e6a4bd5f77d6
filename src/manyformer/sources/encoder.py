"""Cross-attention: keys and values from another sequence, projected once."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, Place, State
from manyformer.sources.base import Keys, Project, Shape, Source


class Projected(NamedTuple):
    """Keys and values of the encoder's output; None until the first call has made them."""

    k: Float[Tensor, "b g s e"] | None = None
    v: Float[Tensor, "b g s f"] | None = None


@final
class Encoded(Source):
    """The sequence in `ctx.memory`, usually an encoder's output (Vaswani et al. 2017, section 3.2.3).

    With a state, its keys and values are projected in the first call and reused in every later one; a kernel that
    folds them gets them once. Raises ValueError where the call brings no memory.
    """

    def start(
        self, batch: int, shape: Shape, *, folds: bool, capacity: int | None, device: torch.device, dtype: torch.dtype
    ) -> State:
        return Projected()

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, project: Project, state: State, *, folds: bool) -> Keys:
        if ctx.memory is None:
            raise ValueError("cross-attention needs a memory to attend to, but the call brings none")
        if state is None:
            return Keys(*project(ctx.memory.y, ctx.memory.place), ctx.memory.place)
        place = ctx.memory.place
        if state.k is None:
            k, v = project(ctx.memory.y, place)
            return Keys(k, v, place, Projected(k[:, :, :0].clone(), v[:, :, :0].clone()) if folds else Projected(k, v))
        if folds:
            # the kernel has them: each key is given once
            place = Place(place.pos[:, :0], place.seg[:, :0])
        return Keys(state.k, state.v, place, state)
