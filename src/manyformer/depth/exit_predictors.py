"""Rules that are learned: small classifiers that foretell the layer after which a token may leave."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.core import PADDING_SEGMENT, Context, MemorySequence
from manyformer.depth.exit_rules import ExitDecision, ExitRule, ExitRuleInput, ThresholdExitRule, at_least_single


class LearnedExitRule(ABC):
    """A rule that learns from the layers at which tokens should have left."""

    per_sequence: bool = False
    """Whether all tokens of a document leave after the same layer."""

    @abstractmethod
    def cost(
        self, streams: Sequence[Float[Tensor, "b l d"]], ctx: Context, wanted: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l"]:
        """The cross entropy of leaving where it is wanted, given what comes out of all layers."""


@final
class SequenceExitRule(ExitRule, LearnedExitRule):
    """One layer for the whole target, from the mean of the encoder's output (Elbayad et al. 2020, equation 8)."""

    per_sequence = True

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.choose = nn.Linear(dim, depth)

    def begin(self, ctx: Context, x: Float[Tensor, "b l d"]) -> Int[Tensor, "b l"]:
        layer: Tensor = self.choose(mean_of_source(ctx)).argmax(-1) + 1
        return layer

    def forward(self, seen: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        assert plan is not None
        return ExitDecision(plan <= seen.number, plan)

    def cost(
        self, streams: Sequence[Float[Tensor, "b l d"]], ctx: Context, wanted: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l"]:
        logits = at_least_single(self.choose(mean_of_source(ctx)))
        return F.cross_entropy(logits.movedim(-1, 1), wanted - 1, reduction="none")


def mean_of_source(ctx: Context) -> Float[Tensor, "b l d"]:
    """For each target token the mean of what the encoder made of its own document, padding left out."""
    memory = ctx.memory
    if memory is None:
        raise ValueError("a predictor of one layer for the whole target needs an encoder's output to look at")
    return _mean(memory, ctx.positions.segment_ids)


def _mean(memory: MemorySequence, seg: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
    rows = memory.y.shape[0]
    same = (seg.expand(rows, -1)[:, :, None] == memory.positions.segment_ids[:, None, :]) & (
        memory.positions.segment_ids != PADDING_SEGMENT
    )[:, None]
    share = same.to(memory.y.dtype)
    return share @ memory.y / share.sum(-1, keepdim=True).clamp(min=1)


@final
class MultinomialExitRule(ExitRule, LearnedExitRule):
    """A layer for each token, from what comes out of the first one (Elbayad et al. 2020, equation 9, "multinomial")."""

    def __init__(self, dim: int, depth: int) -> None:
        super().__init__()
        self.choose = nn.Linear(dim, depth)

    def forward(self, seen: ExitRuleInput, plan: Int[Tensor, "b l"] | None) -> ExitDecision:
        if seen.number == 1:
            plan = self.choose(seen.classifier_input).argmax(-1) + 1
        assert plan is not None
        return ExitDecision(plan <= seen.number, plan)

    def cost(
        self, streams: Sequence[Float[Tensor, "b l d"]], ctx: Context, wanted: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l"]:
        logits = at_least_single(self.choose(streams[0]))
        return F.cross_entropy(logits.movedim(-1, 1), wanted - 1, reduction="none")


@final
class GeometricExitRule(ThresholdExitRule, LearnedExitRule):
    """After every layer the same unit says how likely a token leaves now: sigmoid(w h + b).

    Elbayad et al. (2020, equation 10, "geometric-like"), who exit above their threshold where we do from it on; and
    the "early exit classifier" of Schuster et al. (2022, section 3.4), which learns another lesson.
    """

    def __init__(self, dim: int, values: Sequence[float], *, decay: float | None = None, horizon: int = 1) -> None:
        super().__init__(values, decay=decay, horizon=horizon)
        self.leave = nn.Linear(dim, 1)

    def measure(self, seen: ExitRuleInput) -> tuple[Float[Tensor, "b l"], None]:
        return at_least_single(self.leave(seen.classifier_input)).squeeze(-1).sigmoid(), None

    def logits(self, streams: Sequence[Float[Tensor, "b l d"]]) -> Float[Tensor, "b l n"]:
        """By the logistic function, how likely a token leaves after each layer but the last, once it is there."""
        return at_least_single(torch.cat([self.leave(stream) for stream in streams[:-1]], dim=-1))

    def log_shares(self, streams: Sequence[Float[Tensor, "b l d"]]) -> Float[Tensor, "b l m"]:
        """The logarithm of how likely a token leaves after each layer; whoever comes to the last one leaves there."""
        logits = self.logits(streams)
        stays = F.pad(F.logsigmoid(-logits).cumsum(-1), (1, 0))
        return stays + F.pad(F.logsigmoid(logits), (0, 1))

    def cost(
        self, streams: Sequence[Float[Tensor, "b l d"]], ctx: Context, wanted: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l"]:
        return -self.log_shares(streams).gather(-1, wanted[..., None] - 1).squeeze(-1)
