"""Parallel layers, such as attention heads of different kinds, whose outputs are summed."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, Layer, LayerOutput, State


@final
class ParallelLayers(Layer):
    """The sum of the outputs of layers with the same input, named by their keywords.

    For attention it equals one layer with all heads, whose output projection is split by heads.
    """

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return [layer.init_state(batch, capacity=capacity, device=device, dtype=dtype) for layer in self._layers()]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        states = [None] * len(self._modules) if state is None else state
        outs = [layer(x, ctx, layer_state) for layer, layer_state in zip(self._layers(), states)]
        y, loss = outs[0].y, outs[0].loss
        for out in outs[1:]:
            y, loss = y + out.y, loss + out.loss
        return LayerOutput(y, None if state is None else [out.state for out in outs], loss)

    def _layers(self) -> list[Layer]:
        return list(self._modules.values())  # type: ignore[arg-type]
