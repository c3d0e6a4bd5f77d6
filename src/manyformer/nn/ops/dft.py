"""The real part of the discrete Fourier transform over tokens and channels, per document."""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.nn.core import ContiguousLayout, PackedLayout, TokenPositions
from manyformer.nn.ops.softmax_attention import map_documents
from manyformer.nn.runtime.devices import float64_device

DFTNorm = Literal["backward", "ortho"]
"""Names of torch: the plain sum, or the sum divided by sqrt(n d), which preserves the norm."""


def dft_real_reference(
    x: Float[Tensor, "b l d"], positions: TokenPositions, norm: DFTNorm = "backward"
) -> Float[Tensor, "b l d"]:
    """C_n x C_d - S_n x S_d with matrices of cosines and sines (Lee-Thorp et al. 2021, section 3.2).

    n is the document's length; a token's index is its position. Padding gives zeros.
    """
    exact_device = float64_device(x.device)
    same = positions.same_document(positions).to(exact_device)
    position_ids = positions.position_ids.to(exact_device)
    size = same.sum(-1, keepdim=True).clamp(min=1)
    channel = torch.arange(x.shape[2], device=exact_device)
    # products of positions grow large: their remainder modulo n is exact, and its angle is taken in float64
    products = position_ids[:, :, None] * position_ids[:, None]
    token_angle = (products % size).double() / size * (2 * math.pi)
    channel_angle = (channel[:, None] * channel % x.shape[2]).double() / x.shape[2] * (2 * math.pi)
    dtype = torch.promote_types(x.dtype, torch.float32)
    parts = [torch.where(same, part, 0.0) for part in (token_angle.cos(), token_angle.sin())]
    parts += [channel_angle.cos(), channel_angle.sin()]
    cos, sin, channel_cos, channel_sin = (part.to(dtype).to(x.device) for part in parts)
    y = cos @ x.to(dtype) @ channel_cos - sin @ x.to(dtype) @ channel_sin
    if norm == "ortho":
        y = y / (size.double() * x.shape[2]).sqrt().to(dtype).to(x.device)
    return y.to(x.dtype)


def dft_real(
    x: Float[Tensor, "b l d"], positions: TokenPositions, norm: DFTNorm = "backward"
) -> Float[Tensor, "b l d"]:
    """Fast form of `dft_real_reference` for contiguous documents: O(l d log(l d)), no tensors saved for the gradient.

    The transform is its own transpose, so the input's gradient is the transform of the output's gradient.
    """
    if isinstance(positions.layout, ContiguousLayout):
        return _transform(x, norm)
    if isinstance(positions.layout, PackedLayout) and positions.layout.documents:

        def transform_document(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return _transform(v[:, 0], norm)[:, None]

        one_head = x[:, None]
        return map_documents(one_head, one_head, one_head, positions.layout, transform_document)[:, 0]
    return dft_real_reference(x, positions, norm)


def _transform(x: Float[Tensor, "b l d"], norm: DFTNorm) -> Float[Tensor, "b l d"]:
    y: Tensor = _DFTReal.apply(x, norm)  # type: ignore[no-untyped-call]
    return y


class _DFTReal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: DFTNorm) -> Tensor:
        ctx.norm = norm
        # half precision has no FFT on most devices and is too coarse for sums of thousands of terms
        half = torch.fft.rfft2(x.to(torch.promote_types(x.dtype, torch.float32)), dim=(1, 2), norm=norm).real
        # of real input, channel -m of token k is the conjugate of channel m of token -k
        conjugates = half[..., 1 : (x.shape[2] + 1) // 2].flip(2)
        mirrored = torch.cat([conjugates[:, :1], conjugates[:, 1:].flip(1)], dim=1)
        return torch.cat([half, mirrored], dim=2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _transform(grads[0], ctx.norm), None
