"""Token mixing by a Fourier transform (FNet)."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.masks import AllKeys, Mask
from manyformer.ops.dft import DFTNorm, dft_real


@final
class FourierMixer(Layer):
    """The real part of a Fourier transform over tokens and channels, without parameters (Lee-Thorp et al. 2021, 3.2).

    The paper transforms rows of one length including padding, as does this layer for tokens without segments. With
    segments each document is transformed separately, at its own length, so that padding and packing change nothing.
    `norm` "ortho" preserves the norm of the stream, which matters if no normalization follows; the paper's sums are
    sqrt(l d) times larger. Raises ValueError for any mask but `AllKeys()`, and for a decoding state.
    """

    def __init__(self, mask: Mask | None = None, *, norm: DFTNorm = "backward") -> None:
        super().__init__()
        if mask is not None and mask != AllKeys():
            reason = "each output is a sum over all tokens, including later ones"
            raise ValueError(f"FourierMixer cannot apply the mask {mask!r}: {reason}; it is for encoders")
        self.norm: DFTNorm = norm

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        raise ValueError("FourierMixer cannot continue from a state: a later token changes all earlier outputs")

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(dft_real(x, ctx.positions, self.norm))
