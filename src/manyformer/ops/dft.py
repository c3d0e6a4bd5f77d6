"""The real part of the discrete Fourier transform over tokens and channels, of each document by itself."""

import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, PackedLayout, TokenPositions
from manyformer.ops.softmax_attention import each_document

DFTNorm = Literal["backward", "ortho"]
"""torch's words: the bare sum, or the sum over sqrt(n d), which is as large as its input."""


def naive(x: Float[Tensor, "b l d"], positions: TokenPositions, norm: DFTNorm = "backward") -> Float[Tensor, "b l d"]:
    """C_n x C_d - S_n x S_d with matrices of cosines and sines (Lee-Thorp et al. 2021, section 3.2).

    n is the number of tokens in the document, among which a token stands at its position. Padding gives zeros.
    """
    same = (positions.segment_ids[:, :, None] == positions.segment_ids[:, None]) & (
        positions.segment_ids[:, None] != PADDING_SEGMENT
    )
    size = same.sum(-1, keepdim=True).clamp(min=1)
    channel = torch.arange(x.shape[2], device=x.device)
    # products of positions grow large: what they leave of whole turns is exact, and its angle is taken in float64
    along = (
        (positions.position_ids[:, :, None] * positions.position_ids[:, None] % size).double() / size * (2 * math.pi)
    )
    across = (channel[:, None] * channel % x.shape[2]).double() / x.shape[2] * (2 * math.pi)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (torch.where(same, part, 0.0).to(wide) for part in (along.cos(), along.sin()))
    y = cos @ x.to(wide) @ across.cos().to(wide) - sin @ x.to(wide) @ across.sin().to(wide)
    return (y / (size.double() * x.shape[2]).sqrt() if norm == "ortho" else y).to(x.dtype)


def dft_real(
    x: Float[Tensor, "b l d"], positions: TokenPositions, norm: DFTNorm = "backward"
) -> Float[Tensor, "b l d"]:
    """`naive` by fast transforms where documents lie in one piece: O(l d log(l d)), and nothing kept for the way back.

    The transform is its own transpose, so that the gradient is the transform of the gradient.
    """
    if isinstance(positions.layout, ContiguousLayout):
        return _whole(x, norm)
    if isinstance(positions.layout, PackedLayout) and positions.layout.documents:
        one = x[:, None]
        return each_document(one, one, one, positions.layout, partial(_alone, norm=norm))[:, 0]
    return naive(x, positions, norm)


def _alone(q: Tensor, k: Tensor, v: Tensor, *, norm: DFTNorm) -> Float[Tensor, "1 1 l d"]:
    return _whole(v[:, 0], norm)[:, None]


def _whole(x: Float[Tensor, "b l d"], norm: DFTNorm) -> Float[Tensor, "b l d"]:
    y: Tensor = _Fourier.apply(x, norm)  # type: ignore[no-untyped-call]
    return y


class _Fourier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: DFTNorm) -> Tensor:
        ctx.norm = norm
        # half precision has no transforms on most devices, and sums of thousands of terms have no place in it
        half = torch.fft.rfft2(x.to(torch.promote_types(x.dtype, torch.float32)), dim=(1, 2), norm=norm).real
        # of real input, channel -m of token k is the conjugate of channel m of token -k
        other = half[..., 1 : (x.shape[2] + 1) // 2].flip(2)
        mirrored = torch.cat([other[:, :1], other[:, 1:].flip(1)], dim=1)
        return torch.cat([half, mirrored], dim=2).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _whole(grads[0], ctx.norm), None
