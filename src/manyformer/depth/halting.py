"""Adaptive computation time: how a token's halting probabilities become weights of its states, and when it halts."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.autocast import autocast_disabled


class HaltingState(NamedTuple):
    """Which tokens still run, the probability that each has spent, its steps, and what was left when it halted."""

    running: Bool[Tensor, "b l"]
    probability_sum: Float[Tensor, "b l"]
    steps: Float[Tensor, "b l"]
    remainder: Float[Tensor, "b l"]


class HaltingRule(ABC):
    """What a step's probability means; `freezes_state` says that the state of a token that has halted stays as it is."""

    freezes_state: bool

    @abstractmethod
    def weigh(
        self, tally: HaltingState, chance: Float[Tensor, "b l"], *, slack: float, last: bool
    ) -> tuple[Float[Tensor, "b l"], HaltingState]:
        """The weights of this step's states, 0 where a token does not run, and the tally after it.

        A token halts where its probabilities come to more than 1 - `slack`.
        """

    @abstractmethod
    def mix(
        self, mixed: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        """The output so far, with this step's states."""


@final
class GravesHalting(HaltingRule):
    """The output is the sum of all states by their probabilities, the last one having all that remains.

    Graves 2016 (arXiv:1603.08983), section 2; Dehghani et al. 2019, section 2.2: a token that has halted is copied. So
    weights always sum to 1: at the last step there is, a token halts whatever its probability.
    """

    freezes_state = True

    def weigh(
        self, tally: HaltingState, chance: Float[Tensor, "b l"], *, slack: float, last: bool
    ) -> tuple[Float[Tensor, "b l"], HaltingState]:
        full = torch.ones_like(tally.running) if last else tally.probability_sum + chance > 1 - slack
        halts, goes = tally.running & full, tally.running & ~full
        rest = torch.where(halts, 1 - tally.probability_sum, 0.0)
        goes_on = torch.where(goes, chance, 0.0)
        return goes_on + rest, HaltingState(
            goes, tally.probability_sum + goes_on, tally.steps + tally.running, tally.remainder + rest
        )

    def mix(
        self, mixed: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        return mixed + weights[..., None] * states


@final
class ReleasedHalting(HaltingRule):
    """As Tensor2Tensor's Universal Transformer does it by default (`act_type="basic"`), which differs from the papers.

    Each state is mixed into the output with its weight, which takes that share of all earlier ones away: of
    probabilities 0.3, 0.4 the first state keeps 0.3 x 0.6 x 0.7, and weights sum to less than 1. A token that has
    halted goes on changing, and others see it change. At the last step nothing is forced: who has not halted by then
    has no remainder.
    """

    freezes_state = False

    def weigh(
        self, tally: HaltingState, chance: Float[Tensor, "b l"], *, slack: float, last: bool
    ) -> tuple[Float[Tensor, "b l"], HaltingState]:
        full = tally.probability_sum + chance > 1 - slack
        halts, goes = tally.running & full, tally.running & ~full
        rest = torch.where(halts, 1 - tally.probability_sum, 0.0)
        weights = torch.where(goes, chance, rest)
        return weights, HaltingState(
            goes, tally.probability_sum + weights, tally.steps + tally.running, tally.remainder + rest
        )

    def mix(
        self, mixed: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        return weights[..., None] * states + (1 - weights[..., None]) * mixed


@final
class HaltingUnit(nn.Module):
    """A probability of halting for each token and step, a sigmoid of the stream (Graves 2016, section 2).

    There are `max_steps` steps at most; the loss is `cost` times the mean over tokens of steps and remainder, whose
    gradient is that of the remainder alone. `bias` is where the sigmoid begins: with 1 a token first takes two steps.
    """

    def __init__(
        self,
        dim: int,
        max_steps: int,
        *,
        rule: HaltingRule | None = None,
        cost: float = 0.01,
        slack: float = 0.01,
        bias: float = 1.0,
    ) -> None:
        super().__init__()
        if max_steps < 1:
            raise ValueError(f"HaltingUnit: most ({max_steps}) must be at least 1 step")
        if not 0 <= slack < 1 or cost < 0:
            raise ValueError(f"HaltingUnit: slack ({slack}) must be in [0, 1), cost ({cost}) at least 0")
        self.rule = GravesHalting() if rule is None else rule
        self.max_steps, self.cost, self.slack = max_steps, cost, slack
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.tensor(float(bias)))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def begin(self, real: Bool[Tensor, "b l"], like: Float[Tensor, "b l d"]) -> HaltingState:
        """Every token runs that is no padding."""
        nothing = like.new_zeros(real.shape, dtype=torch.promote_types(like.dtype, torch.float32))
        return HaltingState(real, nothing, nothing, nothing)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l"]:
        """The probability that each token halts at this step; in float32 at least, as they are added up."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with autocast_disabled(x.device):
            return torch.sigmoid(F.linear(x.to(wide), self.weight[None].to(wide))[..., 0] + self.bias.to(wide))

    def weigh(
        self, tally: HaltingState, chance: Float[Tensor, "b l"], step: int
    ) -> tuple[Float[Tensor, "b l"], HaltingState]:
        """The weights of the states of step number `step`, and the tally after it."""
        return self.rule.weigh(tally, chance, slack=self.slack, last=step == self.max_steps - 1)

    def loss(self, tally: HaltingState, real: Bool[Tensor, "b l"]) -> Tensor:
        """The ponder cost: the mean over tokens that are no padding."""
        each = torch.where(real, tally.steps + tally.remainder, 0.0)
        return self.cost * each.sum() / real.sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"{type(self.rule).__name__}, at most {self.max_steps} steps, cost={self.cost}"
