"""How the next token is chosen: greedily, by sampling, or by beam search over whole sequences."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.errors import UserError
from manyformer.system.devices import float64_device

MAX_UNIFORM = 1 - 2.0**-24
"""The largest random number that is drawn: its product with a sum stays below that sum in spite of rounding."""


class LengthPenalty(ABC):
    """The divisor of the log-probability of a sequence of `length` tokens, which must not decrease with the length.

    The length includes the end token and excludes the start token.
    """

    @abstractmethod
    def __call__(self, length: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]: ...


@final
@dataclass(frozen=True)
class GNMTPenalty(LengthPenalty):
    """((5 + length) / 6) ** alpha (Wu et al. 2016, equation 14; Vaswani et al. 2017 use alpha 0.6)."""

    alpha: float = 0.6

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def __call__(self, length: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return ((5 + length) / 6) ** self.alpha


@final
@dataclass(frozen=True)
class AverageLogProbPenalty(LengthPenalty):
    """length ** alpha, the rule of `transformers` and fairseq; alpha 1 gives the mean log-probability of a token."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def __call__(self, length: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return length**self.alpha


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha < float("inf"):
        raise UserError(f"the length penalty's alpha must be 0 (no penalty) or more, got {alpha}")


class BeamScores(NamedTuple):
    """The scores after a step of beam search, which decide whether the search for a prompt ends.

    `live` are the best log-probabilities of unfinished sequences, `finished` the scores of finished ones (best first,
    minus infinity where there is none), `best` the number of hypotheses to return, `penalty` and `final_penalty` the
    length penalties at the current and at the maximum length.
    """

    live: Float[Tensor, " b"]
    finished: Float[Tensor, "b w"]
    best: int
    penalty: Float[Tensor, ""]
    final_penalty: Float[Tensor, " b"]


class BeamStopping(ABC):
    """The rule that ends the search for one prompt before all its sequences are finished."""

    @abstractmethod
    def can_improve(self, scores: BeamScores) -> Bool[Tensor, " b"]:
        """Whether the search for each prompt continues."""


@final
@dataclass(frozen=True)
class ExactStopping(BeamStopping):
    """Ends when no unfinished sequence can enter the `best` hypotheses any more: the result of an exhaustive search."""

    def can_improve(self, scores: BeamScores) -> Bool[Tensor, " b"]:
        # a log-probability can only decrease, and the penalty is largest at the maximum length
        return scores.live / scores.final_penalty > scores.finished[:, scores.best - 1]


@final
@dataclass(frozen=True)
class LikelyStopping(BeamStopping):
    """Ends when the best unfinished sequence, scored at its current length, is worse than every finished one.

    The default of `transformers`: faster than `ExactStopping`, and it may miss a longer and better sequence if alpha is
    above 0."""

    def can_improve(self, scores: BeamScores) -> Bool[Tensor, " b"]:
        return scores.live / scores.penalty > scores.finished[:, -1]


@final
@dataclass(frozen=True)
class FullBeamStopping(BeamStopping):
    """Ends once `width` sequences are finished, and no later than `LikelyStopping`."""

    def can_improve(self, scores: BeamScores) -> Bool[Tensor, " b"]:
        return scores.finished[:, -1].isneginf() & LikelyStopping().can_improve(scores)


class StepChoice(ABC):
    """A method that chooses each token once, without revising it: greedy decoding or sampling."""

    @abstractmethod
    def seeds(self, prompts: int) -> list[int]:
        """One seed per row: the rows of the first prompt, then those of the second, and so on, equally many each."""

    @abstractmethod
    def draws(self, seeds: list[int], max_steps: int, device: torch.device) -> Float[Tensor, "r n"] | None:
        """A random number in [0, 1) for each row and step; None chooses the most likely tokens."""


@final
@dataclass(frozen=True)
class GreedyChoice(StepChoice):
    """Greedy decoding: the most likely token at each step."""

    def seeds(self, prompts: int) -> list[int]:
        return [0] * prompts

    def draws(self, seeds: list[int], max_steps: int, device: torch.device) -> None:
        return


@final
@dataclass(frozen=True)
class SampledChoice(StepChoice):
    """Sampling from the distribution of the next token; `samples` sequences for each prompt.

    Sample j of every prompt has its own generator, seeded with `seed` + j: a sequence depends on its prompt and its
    seed, never on the other rows of the batch. Without a seed a random one is drawn for every row. The seeds of each
    prompt start `seed_stride` above those of the previous prompt; with 0 all prompts have the same seeds.
    """

    seed: int | None = None
    samples: int = 1
    seed_stride: int = 0

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.samples < 1:
            raise UserError(f"samples must be 1 or more, got {self.samples}")

    def seeds(self, prompts: int) -> list[int]:
        if self.seed is not None:
            first_seeds = [self.seed + prompt * self.seed_stride for prompt in range(prompts)]
            return [first_seed + sample for first_seed in first_seeds for sample in range(self.samples)]
        return [int.from_bytes(os.urandom(6), "big") for _ in range(prompts * self.samples)]

    def draws(self, seeds: list[int], max_steps: int, device: torch.device) -> Float[Tensor, "r n"]:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        rows = [torch.rand(max_steps, generator=generator, dtype=torch.float64) for generator in generators]
        return torch.stack(rows).clamp_(max=MAX_UNIFORM).to(float64_device(device))


@final
@dataclass(frozen=True)
class BeamSettings:
    """Beam search with `width` unfinished sequences per prompt, which returns the `best` finished ones with scores.

    Unfinished sequences are ranked by log-probability, finished ones by log-probability / `penalty`; `stopping` decides
    when the search ends. A sequence that reaches the length limit counts as finished.
    """

    width: int = 4
    penalty: LengthPenalty = field(default_factory=GNMTPenalty)
    best: int = 1
    stopping: BeamStopping = field(default_factory=ExactStopping)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"beam must be 1 or wider, got {self.width}")
        if not 1 <= self.best <= self.width:
            raise UserError(f"best must be from 1 to the beam's width {self.width}, got {self.best}")


TokenChoice = StepChoice | BeamSettings
"""How tokens are chosen: token by token, or by beam search."""


def choose_tokens(
    logits: Float[Tensor, "r v"], draws: Float[Tensor, " r"] | None
) -> tuple[Int[Tensor, " r"], Float[Tensor, " r"]]:
    """The most likely token of each row, or with random numbers `draws` one sampled by inversion of the cumulative sum.

    Also returns a score for each row that is finite if and only if there was a token to choose.
    """
    if draws is None:
        score, token = logits.max(-1)
        return token, score
    # summed in double precision: in a large vocabulary the last probabilities would otherwise be rounded away
    probabilities = logits.softmax(-1, dtype=torch.float32).to(float64_device(logits.device))
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    token = torch.searchsorted(cumulative, draws[:, None] * total, right=True)
    return token[:, 0].clamp_(max=logits.shape[-1] - 1).to(logits.device), total[:, 0].float().to(logits.device)
