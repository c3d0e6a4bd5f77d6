"""A layer that adds the source to every token, without attention."""

from typing import final

from jaxtyping import Float
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, Context, Layer, LayerOutput, State


@final
class SourceVector(Layer):
    """Adds the mean of the source's vectors to every token: of a class, that of the class (Parmar et al. 2018, 5.1).

    A source without any token adds nothing. Raises ValueError without a source."""

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if ctx.memory is None:
            raise ValueError("SourceVector adds the source of an encoder-decoder, and there is none")
        vectors, positions = ctx.memory
        is_token = (positions.segment_ids != PADDING_SEGMENT)[..., None].to(vectors.dtype)
        total = (vectors * is_token).sum(1, keepdim=True)
        count = is_token.sum(1, keepdim=True)
        return LayerOutput(x + total / count.clamp(min=1), state)
