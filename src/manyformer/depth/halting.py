"""Adaptive computation time: halting probabilities, the weights of states that follow from them, the ponder cost."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.autocast import autocast_disabled


class HaltingState(NamedTuple):
    """For each token: whether it still runs, its sum of halting probabilities, its steps, its remainder on halting."""

    running: Bool[Tensor, "b l"]
    probability_sum: Float[Tensor, "b l"]
    steps: Float[Tensor, "b l"]
    remainder: Float[Tensor, "b l"]


class HaltingRule(ABC):
    """Turns halting probabilities into weights.

    `freezes_state` states whether a halted token keeps its state; every token then halts at the last step.
    """

    freezes_state: bool

    def weigh(
        self, state: HaltingState, probability: Float[Tensor, "b l"], *, slack: float, last: bool
    ) -> tuple[Float[Tensor, "b l"], HaltingState]:
        """The weights of this step's states, 0 for tokens that do not run, and the halting state after the step.

        A token halts when the sum of its probabilities exceeds 1 - `slack`.
        """
        halts_now = last and self.freezes_state
        if halts_now:
            reached = torch.ones_like(state.running)
        else:
            reached = state.probability_sum + probability > 1 - slack
        running = state.running & ~reached
        remainder = torch.where(state.running & reached, 1 - state.probability_sum, 0.0)
        weights = torch.where(running, probability, remainder)
        probability_sum = state.probability_sum + weights
        steps = state.steps + state.running
        return weights, HaltingState(running, probability_sum, steps, state.remainder + remainder)

    @abstractmethod
    def mix(
        self, output: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        """The output so far, updated with this step's states."""


@final
class GravesHalting(HaltingRule):
    """The output is the sum of all states weighted by their probabilities; the last one has the remaining probability.

    Graves 2016 (arXiv:1603.08983), section 2; Dehghani et al. 2019, section 2.2: a token that has halted is copied. So
    weights always sum to 1: at the maximum number of steps a token halts whatever its probability.
    """

    freezes_state = True

    def mix(
        self, output: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        return output + weights[..., None] * states


@final
class ReleasedHalting(HaltingRule):
    """The default of Tensor2Tensor's Universal Transformer (`act_type="basic"`), which differs from the papers.

    Each state is mixed into the output by its weight, as a moving average: with probabilities 0.3, 0.4 and a remainder
    of 0.3 the share of the first state ends as 0.3 x 0.6 x 0.7, and shares sum to less than 1. A halted token continues
    to change, and other tokens attend to its changed states. At the last step halting is not forced: a token that has
    not halted by then has no remainder.
    """

    freezes_state = False

    def mix(
        self, output: Float[Tensor, "b l d"], states: Float[Tensor, "b l d"], weights: Float[Tensor, "b l"]
    ) -> Float[Tensor, "b l d"]:
        return weights[..., None] * states + (1 - weights[..., None]) * output


@final
class HaltingUnit(nn.Module):
    """A probability of halting for each token and step, a sigmoid of the stream (Graves 2016, section 2).

    There are `max_steps` steps at most; the loss is `ponder_cost` times the mean over tokens of steps plus remainder,
    whose gradient is that of the remainder alone. `bias` is the initial bias of the sigmoid: with 1 an untrained token
    takes two steps.
    """

    def __init__(
        self,
        dim: int,
        max_steps: int,
        *,
        rule: HaltingRule | None = None,
        ponder_cost: float = 0.01,
        slack: float = 0.01,
        bias: float = 1.0,
    ) -> None:
        super().__init__()
        if max_steps < 1:
            raise ValueError(f"HaltingUnit: max_steps ({max_steps}) must be at least 1")
        if not 0 <= slack < 1 or ponder_cost < 0:
            raise ValueError(f"HaltingUnit: slack ({slack}) must be in [0, 1), ponder_cost ({ponder_cost}) at least 0")
        self.rule = GravesHalting() if rule is None else rule
        self.max_steps = max_steps
        self.ponder_cost = ponder_cost
        self.slack = slack
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.tensor(float(bias)))
        nn.init.normal_(self.weight, std=dim**-0.5)

    def init_state(self, valid: Bool[Tensor, "b l"], like: Float[Tensor, "b l d"]) -> HaltingState:
        """The initial halting state: every token except padding runs, with zero accumulated probability."""
        zeros = like.new_zeros(valid.shape, dtype=torch.promote_types(like.dtype, torch.float32))
        return HaltingState(valid, zeros, zeros, zeros)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b l"]:
        """The probability that each token halts at this step; in float32 at least, because steps are summed."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with autocast_disabled(x.device):
            return torch.sigmoid(F.linear(x.to(dtype), self.weight[None].to(dtype))[..., 0] + self.bias.to(dtype))

    def weigh(
        self, state: HaltingState, probability: Float[Tensor, "b l"], step: int
    ) -> tuple[Float[Tensor, "b l"], HaltingState]:
        """The weights of the states of step number `step`, and the halting state after it."""
        return self.rule.weigh(state, probability, slack=self.slack, last=step == self.max_steps - 1)

    def loss(self, state: HaltingState, valid: Bool[Tensor, "b l"]) -> Tensor:
        """The ponder cost: the mean over all tokens except padding."""
        token_cost = torch.where(valid, state.steps + state.remainder, 0.0)
        return self.ponder_cost * token_cost.sum() / valid.sum().clamp(min=1)

    def extra_repr(self) -> str:
        return f"{type(self.rule).__name__}, at most {self.max_steps} steps, ponder_cost={self.ponder_cost}"
