"""Which tokens of a text a masked diffusion hides, and what weight the loss of each has: schedules and counts.

Both forms estimate the same bound: -log p(x) <= E_t [p'(t) / p(t) sum over the hidden tokens of -log p(x_i | x_t)]
(Sahoo et al. 2024, arXiv:2406.07524, equation 10), where p(t) is the probability that a token is hidden."""

from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LEAST_LEVEL = 1e-3
"""The lowest noise level of training in the released code of MDLM and LLaDA: the weight of a token is at most 1000."""


class Hidden(NamedTuple):
    """Which tokens are hidden, and the weight of the loss of each, 0 where none is."""

    is_hidden: Bool[Tensor, "b l"]
    weights: Float[Tensor, "b l"]


class Units(NamedTuple):
    """What shares a noise level, documents or blocks of them: for each token the column of the first token of its unit.

    `targets` says which tokens may be hidden."""

    starts: Int[Tensor, "b l"]
    is_target: Bool[Tensor, "b l"]

    def levels(self, noise: Float[Tensor, "b l 2"]) -> Float[Tensor, "b l"]:
        """The level of each token, that of its unit."""
        return noise[..., 0].gather(1, self.starts)


@final
class NoiseSchedule(NamedTuple):
    """Hides each target with the probability p(t) = low + (high - low) t, and weighs its loss with scale / p(t).

    Clipped schedules, with a `low` far above 0, give gradients of a lower variance (Arriola et al. 2025,
    arXiv:2503.09573, section 5), and no bound: `hide_counts` gives that."""

    low: float
    high: float
    scale: float = 1.0

    def hide(self, noise: Float[Tensor, "b l 2"], units: Units) -> Hidden:
        """The hidden tokens of a step of training."""
        probability = self.low + (self.high - self.low) * units.levels(noise)
        is_hidden = (noise[..., 1] < probability) & units.is_target
        return Hidden(is_hidden, torch.where(is_hidden, self.scale / probability, 0.0))


MDLM_SCHEDULE = NoiseSchedule((1 - 1e-3) * LEAST_LEVEL, 1 - 1e-3, 1 - 1e-3)
"""p = (1 - 0.001) t with the weight 1 / t, t from 0.001 to 1: the log-linear schedule of MDLM's released code."""

LLADA_SCHEDULE = NoiseSchedule(LEAST_LEVEL, 1.0)
"""p = (1 - 0.001) t + 0.001 with the weight 1 / p (Nie et al. 2025, arXiv:2502.09992, appendix A; released code)."""


def hide_counts(noise: Float[Tensor, "b l 2"], units: Units) -> Hidden:
    """Hides k of the n targets of a unit, k uniform from 1 to n, and weighs them with n / k: the bound without t.

    Its mean is that of every schedule without limits of t, with less variance, since no unit is without a hidden token
    (Nie et al. 2025, section 2.4 and appendix A). The k targets with the smallest numbers are hidden."""
    rows, length = units.starts.shape
    # units in the order of their first columns, then others than targets; within a unit by the second number
    unit = torch.where(units.is_target, units.starts, length)
    counts = torch.zeros(rows, length + 1, dtype=torch.long, device=unit.device)
    counts.scatter_add_(1, unit, torch.ones_like(unit))
    by_number = noise[..., 1].argsort(dim=1)
    by_unit = unit.gather(1, by_number).argsort(dim=1, stable=True)
    rank = by_number.gather(1, by_unit).argsort(dim=1)
    rank_in_unit = rank - (counts.cumsum(1) - counts).gather(1, unit)
    n = counts.gather(1, unit)
    k = torch.minimum((units.levels(noise) * n).long() + 1, n)
    is_hidden = (rank_in_unit < k) & units.is_target
    return Hidden(is_hidden, torch.where(is_hidden, n / k, 0.0))
