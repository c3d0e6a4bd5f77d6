"""Who leaves a stack after which layer: what a rule is told and says, and measures of confidence with a threshold."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyformer.core import Context
from manyformer.training_hooks import OptionalOnLoad

START = 0.9
"""How much of a decaying threshold does not decay (Schuster et al. 2022, equation 5)."""


class ExitRuleInput(NamedTuple):
    """What comes out of layer `number`, from 1 on: the stream after it and before it, and as classifiers read it."""

    number: int
    hidden: Float[Tensor, "b l d"]
    previous_hidden: Float[Tensor, "b l d"]
    classifier_input: Float[Tensor, "b l d"]
    pos: Int[Tensor, "b l"]


class ExitDecision(NamedTuple):
    """Which tokens leave; what is planned for later layers; and logits, where they had to be known for it."""

    leaves: Bool[Tensor, "b l"]
    plan: Int[Tensor, "b l"] | None = None
    logits: Float[Tensor, "b l v"] | None = None


class ExitRule(nn.Module, OptionalOnLoad, ABC):
    """Decides after each layer but the last who leaves; a token's own past is all that it may look at."""

    def begin(self, ctx: Context, x: Float[Tensor, "b l d"]) -> Int[Tensor, "b l"] | None:
        """What is planned before the first layer: the number of the layer that each token leaves after."""
        return None

    def applies_after(self, number: int) -> bool:
        """Whether anybody may leave after layer `number`: else nothing need be known there."""
        return True

    @abstractmethod
    def forward(self, seen: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision: ...


@final
class NeverExit(ExitRule):
    """Nobody leaves before the last layer."""

    def applies_after(self, number: int) -> bool:
        return False

    def forward(self, seen: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        return ExitDecision(torch.zeros_like(seen.pos, dtype=torch.bool))


@final
class RandomExit(ExitRule):
    """Every token leaves after a random layer of `depth`: the exit sequences of mixed training."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth = depth

    def begin(self, ctx: Context, x: Float[Tensor, "b l d"]) -> Int[Tensor, "b l"]:
        return torch.randint(1, self.depth + 1, x.shape[:2], device=x.device)

    def forward(self, seen: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        assert plan is not None
        return ExitDecision(plan <= seen.number, plan)


class ThresholdExitRule(ExitRule):
    """Tokens leave whose confidence, from 0 to 1, reaches a threshold: `values` has one for each layer but the last.

    Above 1 nobody leaves. With `decay` the threshold falls with the position t of a token in its document to
    0.9 value + 0.1 exp(-decay t / horizon), which stays within [0, 1] (Schuster et al. 2022, equation 5).
    """

    def __init__(self, values: Sequence[float], *, decay: float | None = None, horizon: int = 1) -> None:
        super().__init__()
        self.values, self.decay, self.horizon = tuple(values), decay, horizon

    @abstractmethod
    def measure(self, seen: ExitRuleInput) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b l v"] | None]:
        """How sure each token is of what it would be taken for, and the logits, where they were formed."""

    def applies_after(self, number: int) -> bool:
        return self.values[number - 1] <= 1

    def forward(self, seen: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        if not self.applies_after(seen.number):
            return ExitDecision(torch.zeros_like(seen.pos, dtype=torch.bool))
        value = self.values[seen.number - 1]
        sure, logits = self.measure(seen)
        return ExitDecision(sure >= (value if self.decay is None else self.decayed(value, seen.pos)), None, logits)

    def decayed(self, value: float, pos: Int[Tensor, "b l"]) -> Float[Tensor, "b l"]:
        """The threshold of tokens at these positions."""
        assert self.decay is not None
        fading = torch.exp(pos * (-self.decay / self.horizon))
        return (START * value + (1 - START) * fading).clamp(0, 1)

    def extra_repr(self) -> str:
        return ", ".join(f"{value:g}" for value in self.values)


@runtime_checkable
class LayerClassifiers(Protocol):
    """What says the next token after any layer."""

    def at(self, ready: Float[Tensor, "b l d"], number: int) -> Float[Tensor, "b l v"]:
        """The logits of what came out of layer `number`."""


class ClassifierExitRule(ThresholdExitRule):
    """By the distribution over classes; of all measures it alone projects to the vocabulary."""

    def __init__(
        self, classifiers: LayerClassifiers, values: Sequence[float], *, decay: float | None = None, horizon: int = 1
    ) -> None:
        super().__init__(values, decay=decay, horizon=horizon)
        # not as a part: they belong to the model's head, under whose name their weights are saved
        self._classifiers = (classifiers,)

    @abstractmethod
    def sure(self, two: Float[Tensor, "b l 2"]) -> Float[Tensor, "b l"]:
        """The confidence from the probabilities of the two likeliest classes."""

    def measure(self, seen: ExitRuleInput) -> tuple[Float[Tensor, "b l"], Float[Tensor, "b l v"] | None]:
        logits = self._classifiers[0].at(seen.classifier_input, seen.number)
        wide = at_least_single(logits)
        two = (wide.topk(2).values - wide.logsumexp(-1, keepdim=True)).exp()
        return self.sure(two), logits


@final
class MarginExitRule(ClassifierExitRule):
    """The difference of the two largest probabilities: "softmax response" (Schuster et al. 2022, section 3.4)."""

    def sure(self, two: Float[Tensor, "b l 2"]) -> Float[Tensor, "b l"]:
        return two[..., 0] - two[..., 1]


@final
class MaxProbabilityExitRule(ClassifierExitRule):
    """The largest probability: "confidence thresholding" (Elbayad et al. 2020, section 4.3)."""

    def sure(self, two: Float[Tensor, "b l 2"]) -> Float[Tensor, "b l"]:
        return two[..., 0]


@final
class SaturationExitRule(ThresholdExitRule):
    """How parallel the stream stays from layer to layer, by the cosine; never after the first one.

    "Hidden-state saturation" (Schuster et al. 2022, section 3.4). A negative cosine is no confidence: 0.
    """

    def measure(self, seen: ExitRuleInput) -> tuple[Float[Tensor, "b l"], None]:
        if seen.number == 1:
            return torch.full_like(seen.pos, -math.inf, dtype=torch.float32), None
        after, before = at_least_single(seen.hidden), at_least_single(seen.previous_hidden)
        return F.cosine_similarity(after, before, dim=-1).clamp(min=0), None


def at_least_single(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """In half precision too many tokens would be equally sure."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def append_exit_layer(x: Float[Tensor, "b l d"], number: int) -> Float[Tensor, "b l m"]:
    """The stream with one more channel that says after which layer all of its tokens left."""
    return torch.cat([x, torch.full_like(x[..., :1], number)], dim=-1)
