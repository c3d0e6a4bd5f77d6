"""The real part of the discrete Fourier transform over tokens and channels, of each document by itself."""

import math
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.core import PADDING, Packed, Place, Plain
from manyformer.ops.softmax import each_document

Norm = Literal["backward", "ortho"]
"""torch's words: the bare sum, or the sum over sqrt(n d), which is as large as its input."""


def naive(x: Float[Tensor, "b l d"], place: Place, norm: Norm = "backward") -> Float[Tensor, "b l d"]:
    """C_n x C_d - S_n x S_d with matrices of cosines and sines (Lee-Thorp et al. 2021, section 3.2).

    n is the number of tokens in the document, among which a token stands at its position. Padding gives zeros.
    """
    same = (place.seg[:, :, None] == place.seg[:, None]) & (place.seg[:, None] != PADDING)
    size = same.sum(-1, keepdim=True).clamp(min=1)
    channel = torch.arange(x.shape[2], device=x.device)
    # products of positions grow large: what they leave of whole turns is exact, and its angle is taken in float64
    along = (place.pos[:, :, None] * place.pos[:, None] % size).double() / size * (2 * math.pi)
    across = (channel[:, None] * channel % x.shape[2]).double() / x.shape[2] * (2 * math.pi)
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = (torch.where(same, part, 0.0).to(wide) for part in (along.cos(), along.sin()))
    y = cos @ x.to(wide) @ across.cos().to(wide) - sin @ x.to(wide) @ across.sin().to(wide)
    return (y / (size.double() * x.shape[2]).sqrt() if norm == "ortho" else y).to(x.dtype)


def fourier(x: Float[Tensor, "b l d"], place: Place, norm: Norm = "backward") -> Float[Tensor, "b l d"]:
    """`naive` by fast transforms where documents lie in one piece: O(l d log(l d)), and nothing kept for the way back.

    The transform is its own transpose, so that the gradient is the transform of the gradient.
    """
    if isinstance(place.layout, Plain):
        return _whole(x, norm)
    if isinstance(place.layout, Packed) and place.layout.documents:
        one = x[:, None]
        return each_document(one, one, one, place.layout, partial(_alone, norm=norm))[:, 0]
    return naive(x, place, norm)


def _alone(q: Tensor, k: Tensor, v: Tensor, *, norm: Norm) -> Float[Tensor, "1 1 l d"]:
    return _whole(v[:, 0], norm)[:, None]


def _whole(x: Float[Tensor, "b l d"], norm: Norm) -> Float[Tensor, "b l d"]:
    y: Tensor = _Fourier.apply(x, norm)  # type: ignore[no-untyped-call]
    return y


class _Fourier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, norm: Norm) -> Tensor:
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
