"""Token mixing by two matrices, learned or random: the variants of FNet without a Fourier transform."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.masks import AllKeys
from manyformer.mixers.position_pairs import PairTable
from manyformer.mixers.spatial_gate import apply_weights, dense_mask


@final
class LinearMixer(Layer):
    """P X C: one matrix over the tokens of a document, one over channels (Lee-Thorp et al. 2021, section 4.1).

    Learned, it is the paper's "Linear"; not `trainable`, its "Random". Both matrices are drawn such that a token keeps
    its norm if `max_length` tokens are mixed. Shorter documents use the first rows and columns. Raises ValueError for
    documents beyond `max_length`, and for a decoding state."""

    def __init__(self, dim: int, max_length: int, *, trainable: bool = True) -> None:
        super().__init__()
        self.tokens = PairTable(max_length, std=max_length**-0.5, trainable=trainable)
        self.channels = nn.Parameter(torch.randn(dim, dim) * dim**-0.5, requires_grad=trainable)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        raise ValueError("LinearMixer cannot continue from a state: a later token changes all earlier outputs")

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        visible = dense_mask(AllKeys(), ctx.positions, ctx.positions, 1)
        weights = self.tokens(ctx.positions, ctx.positions).masked_fill(~visible, 0.0)
        return LayerOutput(apply_weights(weights, (x @ self.channels)[:, None])[:, 0])
