"""Layers that add another sequence to the stream without projections: retrieved tokens by attention, or its mean."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import PADDING_SEGMENT, Context, Layer, LayerOutput, State
from manyformer.nn.runtime.training_hooks import UsesNeighbours


@final
class NeighbourAttention(Layer, UsesNeighbours):
    """(1 - g) m + g x, where x attends to the k tokens retrieved for it (Yogatama et al. 2021, section 2).

    `Context.memory` holds the embeddings of the retrieved tokens, k per token in the order of the text. m is their sum
    weighted by softmax(y.x), without projections; g = sigmoid(w.x + b) is one number per token, 1 if nothing was
    retrieved. The paper mentions no bias; it is initialized with 0.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 1)
        nn.init.zeros_(self.gate.bias)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.memory is None:
            if self.training and torch.is_grad_enabled():
                # a gradient of zero: replicas wait for one of every weight
                x = x + 0.0 * self.gate(x).sigmoid()
            return LayerOutput(x, state)
        rows, length, dim = x.shape
        y = ctx.memory.y.view(rows, length, -1, dim)
        valid = (ctx.memory.positions.segment_ids != PADDING_SEGMENT).view(rows, length, -1)
        has_neighbours = valid.any(-1, keepdim=True)
        # a row of infinities has no softmax: tokens without any neighbor keep their scores, and the gate ignores them
        scores = (y @ x[..., None])[..., 0].masked_fill(~valid & has_neighbours, -torch.inf)
        mixture = (scores.softmax(-1)[..., None, :] @ y)[..., 0, :]
        gate = torch.where(has_neighbours, self.gate(x).sigmoid(), 1.0)
        ctx.watch(self, "gate", gate)
        return LayerOutput(gate * x + (1 - gate) * mixture, state)


@final
class SourceVector(Layer):
    """Adds the mean of the source's vectors to every token: of a class, that of the class (Parmar et al. 2018, 5.1).

    A source without any token adds nothing. Raises ValueError without a source."""

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.memory is None:
            raise ValueError("SourceVector adds the source of an encoder-decoder, and there is none")
        vectors, positions = ctx.memory
        is_token = (positions.segment_ids != PADDING_SEGMENT)[..., None].to(vectors.dtype)
        # padding may stand among the tokens of a source
        total = (vectors * is_token).sum(1, keepdim=True)
        count = is_token.sum(1, keepdim=True)
        return LayerOutput(x + total / count.clamp(min=1), state)
