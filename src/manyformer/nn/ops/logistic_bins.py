"""Discretized logistic distributions: exact log-probabilities of ordered levels, without overflow.

Level i of n stands for 2 i / (n - 1) - 1, between -1 and 1, and its bin extends half a step to both sides; those of the
lowest and the highest level are open (Salimans et al. 2017, PixelCNN++, section 2.1). With the logistic function s,
s(a) - s(b) = s(a) s(-b) (1 - exp(b - a)): factors below 1 whose logarithms add up, where a difference of two numbers
near 1 would lose all digits.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def log_levels(
    mean: Float[Tensor, "*b k"], log_scale: Float[Tensor, "*b k"], levels: int
) -> Float[Tensor, "*b k levels"]:
    """The log-probability of every level under each distribution."""
    edges = _upper_edge(torch.arange(levels - 1, device=mean.device, dtype=mean.dtype), levels)
    standardized = (edges - mean[..., None]) * torch.exp(-log_scale)[..., None]
    below = F.logsigmoid(standardized)
    # log s(-a) = log s(a) - a: the rounding error for a far below 0 is small relative to `below`
    above = below - standardized
    # both ends are open
    inner = _log_bin_width(log_scale, levels)[..., None].expand(*log_scale.shape, levels - 2)
    return F.pad(below, (0, 1)) + F.pad(above, (1, 0)) + F.pad(inner, (1, 1))


def log_level(
    mean: Float[Tensor, "*b k"], log_scale: Float[Tensor, "*b k"], level: Int[Tensor, "*b"], levels: int
) -> Float[Tensor, "*b k"]:
    """The log-probability of one level for each row, as training needs it."""
    number = level[..., None].to(mean.dtype)
    rate = torch.exp(-log_scale)
    lowest = number == 0
    highest = number == levels - 1
    below = F.logsigmoid((_upper_edge(number, levels) - mean) * rate).masked_fill(highest, 0.0)
    above = F.logsigmoid((mean - _upper_edge(number - 1, levels)) * rate).masked_fill(lowest, 0.0)
    return below + above + _log_bin_width(log_scale, levels).masked_fill(lowest | highest, 0.0)


def _upper_edge(number: Float[Tensor, "*n"], levels: int) -> Float[Tensor, "*n"]:
    """Upper edge of the bin of level `number`: integer arithmetic up to one division, so that it is exact."""
    return (2 * number + 2 - levels) / (levels - 1)


def _log_bin_width(log_scale: Float[Tensor, "*b k"], levels: int) -> Float[Tensor, "*b k"]:
    """log(1 - exp(-step / scale)) for the step between levels, the term of the bin's width."""
    return torch.log(-torch.expm1(-2 / (levels - 1) * torch.exp(-log_scale)))
