"""Sines and cosines of positions in the three layouts that papers and their code use."""

import math
from typing import Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

SinusoidLayout = Literal["interleaved", "halves", "timing"]
"""Sine and cosine by turns, as in the paper; all sines first, as in Marian; or Tensor2Tensor's timing signal."""


BASE = 10_000.0
"""The longest wave is 2 pi times as long, about."""


def sinusoid_table(
    pos: Int[Tensor, "*p"], dim: int, layout: SinusoidLayout = "interleaved", *, base: float = BASE
) -> Float[Tensor, "*p d"]:
    """sin(pos / 10000^(2i/dim)) and its cosine for each i below dim / 2 (Vaswani et al. 2017, section 3.5).

    Another `base` may stand in the place of 10000. "halves" has the same frequencies in another order. "timing" is
    ordered like it, but its last rate is 1/10000 itself: pos / 10000^(i / (dim/2 - 1)), in Tensor2Tensor, fairseq and
    so in the Universal Transformer's code. Angles are taken in float64, the result is float32.
    """
    half = dim // 2
    steps = max(half - 1, 1) if layout == "timing" else half
    rate = torch.exp(torch.arange(half, device=pos.device, dtype=torch.float64) * (-math.log(base) / steps))
    angle = pos[..., None].double() * rate
    if layout == "interleaved":
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2).float()
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()


def check_waves(dim: int, layout: str, owner: str, *, base: float = BASE) -> None:
    """Raise ValueError where `dim` channels cannot be filled, or the layout or the waves do not exist."""
    if not base > 1:
        raise ValueError(f"{owner}: base ({base}) must be above 1, so that later waves are longer")
    if dim < 2 or dim % 2:
        raise ValueError(f"{owner}: dim ({dim}) must be even, each frequency has a sine and a cosine")
    if layout not in get_args(SinusoidLayout):
        raise ValueError(f"{owner}: layout ('{layout}') must be one of {', '.join(get_args(SinusoidLayout))}")
