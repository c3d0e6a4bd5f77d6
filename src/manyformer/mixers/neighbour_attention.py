"""Attention over what followed like contexts elsewhere, and a gate between that and the stream."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, Context, Layer, LayerOutput, State
from manyformer.training_hooks import UsesNeighbours


@final
class NeighbourAttention(Layer, UsesNeighbours):
    """(1 - g) m + g x: x attends to the k tokens that were looked up for it (Yogatama et al. 2021, section 2).

    The other sequence of the context holds their embeddings, those for the first token first. m is the sum of them,
    each weighted by softmax(y.x) without any projection; g = sigmoid(w.x + b) is one number a token, 1 where nothing
    was looked up. The paper names no bias; it begins at 0.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 1)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.memory is None:
            return LayerOutput(x, state)
        rows, length, dim = x.shape
        y = ctx.memory.y.view(rows, length, -1, dim)
        there = (ctx.memory.positions.segment_ids != PADDING_SEGMENT).view(rows, length, -1)
        some = there.any(-1, keepdim=True)
        scores = (y @ x[..., None])[..., 0].masked_fill(~there & some, -torch.inf)
        found = (scores.softmax(-1)[..., None, :] @ y)[..., 0, :]
        gate = torch.where(some, self.gate(x).sigmoid(), 1.0)
        ctx.watch(self, "gate", gate)
        return LayerOutput(gate * x + (1 - gate) * found, state)
