"""Mixing by a Fourier transform."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.masks import AllKeys, Mask
from manyformer.ops.dft import DFTNorm, dft_real


@final
class FourierMixer(Layer):
    """The real part of a Fourier transform over tokens and channels, nothing to learn (Lee-Thorp et al. 2021, 3.2).

    The paper transforms rows of one length, padding among the tokens; tokens without segments do the same here. With
    segments each document is transformed by itself, at its own length, so that padding and packing change nothing.
    `norm` "ortho" keeps the size of the stream, which matters where no norm follows; the paper's sums are sqrt(l d)
    times larger.
    Raises ValueError for any mask, above all a causal one, and for a state to go on from.
    """

    def __init__(self, mask: Mask | None = None, *, norm: DFTNorm = "backward") -> None:
        super().__init__()
        if mask is not None and mask != AllKeys():
            why = "each output is a sum over all tokens, later ones too, so that none can be hidden"
            raise ValueError(f"Fourier cannot apply the mask {mask!r}: {why}; it is for encoders")
        self.norm: DFTNorm = norm

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        raise ValueError("Fourier cannot go on from a state: a later token changes all earlier outputs")

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(dft_real(x, ctx.positions, self.norm))
