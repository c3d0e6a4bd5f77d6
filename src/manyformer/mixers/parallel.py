"""Parallel layers, such as attention heads of different kinds, whose outputs are summed."""

from typing import final

from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, LayerOutput, NamedLayers, State


@final
class ParallelLayers(NamedLayers):
    """The sum of the outputs of layers with the same input.

    For attention it equals one layer with all heads, whose output projection is split by heads.
    """

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if state is None:
            states = [None] * len(self._modules)
        else:
            states = state
        outs = [layer(x, ctx, layer_state) for layer, layer_state in zip(self.in_order(), states)]
        y = outs[0].y
        loss = outs[0].loss
        for out in outs[1:]:
            y = y + out.y
            loss = loss + out.loss
        return LayerOutput(y, None if state is None else [out.state for out in outs], loss)
