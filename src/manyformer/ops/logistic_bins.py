"""Logistic distributions cut into bins: how likely each of some ordered levels is, exactly and without overflow.

Level i of n stands for 2 i / (n - 1) - 1, between -1 and 1, and owns what lies within half a step of it; the lowest and
the highest also own what lies beyond (Salimans et al. 2017, PixelCNN++, section 2.1). With the logistic function s,
s(a) - s(b) = s(a) s(-b) (1 - exp(b - a)): products of numbers below 1, whose logarithms add up where a difference of
two numbers near 1 would be lost.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def log_levels(
    mean: Float[Tensor, "*b k"], log_scale: Float[Tensor, "*b k"], levels: int
) -> Float[Tensor, "*b k levels"]:
    """The log-probability of every level under each distribution."""
    edges = _edge_after(torch.arange(levels - 1, device=mean.device, dtype=mean.dtype), levels)
    at = (edges - mean[..., None]) * torch.exp(-log_scale)[..., None]
    below = F.logsigmoid(at)
    # log s(-a) = log s(a) - a: what is lost where a is far below 0 is little beside what `below` is there
    above = below - at
    # both ends are open
    inner = _width(log_scale, levels)[..., None].expand(*log_scale.shape, levels - 2)
    return F.pad(below, (0, 1)) + F.pad(above, (1, 0)) + F.pad(inner, (1, 1))


def log_level(
    mean: Float[Tensor, "*b k"], log_scale: Float[Tensor, "*b k"], level: Int[Tensor, "*b"], levels: int
) -> Float[Tensor, "*b k"]:
    """The log-probability of one level for each row: what training needs, without all the others."""
    number, rate = level[..., None].to(mean.dtype), torch.exp(-log_scale)
    lowest, highest = number == 0, number == levels - 1
    below = F.logsigmoid((_edge_after(number, levels) - mean) * rate).masked_fill(highest, 0.0)
    above = F.logsigmoid((mean - _edge_after(number - 1, levels)) * rate).masked_fill(lowest, 0.0)
    return below + above + _width(log_scale, levels).masked_fill(lowest | highest, 0.0)


def _edge_after(number: Float[Tensor, "*n"], levels: int) -> Float[Tensor, "*n"]:
    """Where level `number` ends and the next one begins: whole numbers but for one division, so that it is exact."""
    return (2 * number + 2 - levels) / (levels - 1)


def _width(log_scale: Float[Tensor, "*b k"], levels: int) -> Float[Tensor, "*b k"]:
    """log(1 - exp(-step / scale)) for the step between levels, which is all that a bin's width adds."""
    return torch.log(-torch.expm1(-2 / (levels - 1) * torch.exp(-log_scale)))
