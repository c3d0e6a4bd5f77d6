"""Sines and cosines of positions in the three channel layouts that papers and their code use."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.system.devices import float64_device

SinusoidLayout = Literal["interleaved", "halves", "timing"]
"""Sine and cosine alternating, as in the paper; all sines first, as in Marian; or Tensor2Tensor's timing signal."""

DEFAULT_BASE = 10_000.0
"""The largest wavelength is about 2 pi times this."""


def sinusoid_table(
    position_ids: Int[Tensor, "*p"],
    dim: int,
    layout: SinusoidLayout = "interleaved",
    *,
    base: float = DEFAULT_BASE,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*p d"]:
    """sin(pos / 10000^(2i/dim)) and its cosine for each i below dim / 2 (Vaswani et al. 2017, section 3.5).

    `base` replaces 10000. "halves" has the same frequencies in another order. "timing" has the order of "halves", but
    its last frequency is 1/10000 itself: pos / 10000^(i / (dim/2 - 1)), in Tensor2Tensor, fairseq and therefore in the
    Universal Transformer's code. Angles are taken in float64, and the result is rounded to `dtype`.
    """
    half = dim // 2
    steps = max(half - 1, 1) if layout == "timing" else half
    device = position_ids.device
    position_ids = position_ids.to(float64_device(device))
    pair = torch.arange(half, device=position_ids.device, dtype=torch.float64)
    frequencies = torch.exp(pair * (-math.log(base) / steps))
    angles = position_ids[..., None].double() * frequencies
    if layout == "interleaved":
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype).to(device)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(dtype).to(device)


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of constants for a model of `dtype`: float32, in which positions do not collide, or more."""
    return torch.promote_types(dtype, torch.float32)


def check_sinusoid(dim: int, layout: str, owner: str, *, base: float = DEFAULT_BASE) -> None:
    """Raise ValueError if `dim` is odd or below 2, `base` is at most 1, or `layout` is no `SinusoidLayout`."""
    if not base > 1:
        raise ValueError(f"{owner}: base ({base}) must be above 1, so that wavelengths increase")
    if dim < 2 or dim % 2:
        raise ValueError(f"{owner}: dim ({dim}) must be even, each frequency has a sine and a cosine")
    if layout not in get_args(SinusoidLayout):
        raise ValueError(f"{owner}: layout ('{layout}') must be one of {', '.join(get_args(SinusoidLayout))}")
