"""Layers beside each other: heads of one kind and heads of another."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, Layer, LayerOutput, State


@final
class ParallelLayers(Layer):
    """The sum of layers that read the same stream, named by their keywords.

    For attention it is the same as one layer with the heads of all, whose output projection is cut by heads.
    """

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return [layer.init_state(batch, capacity=capacity, device=device, dtype=dtype) for layer in self._layers()]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        before = [None] * len(self._modules) if state is None else state
        outs = [layer(x, ctx, kept) for layer, kept in zip(self._layers(), before)]
        y, loss = outs[0].y, outs[0].loss
        for out in outs[1:]:
            y, loss = y + out.y, loss + out.loss
        return LayerOutput(y, None if state is None else [out.state for out in outs], loss)

    def _layers(self) -> list[Layer]:
        return list(self._modules.values())  # type: ignore[arg-type]
