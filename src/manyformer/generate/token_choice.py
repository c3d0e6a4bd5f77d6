"""How the next token is chosen: the likeliest, a random one, or by a search over whole sequences."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyformer.errors import UserError

LARGEST = 1 - 2.0**-24
"""A random number times a sum must stay below the sum in spite of rounding."""


class LengthPenalty(ABC):
    """By what the log-probability of a sequence of `length` tokens is divided; it never falls with the length.

    The length counts the end token and not the start token.
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
    """length ** alpha, the rule of `transformers` and fairseq; with alpha 1 the mean log-probability of a token."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check_alpha(self.alpha)

    def __call__(self, length: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        return length**self.alpha


def _check_alpha(alpha: float) -> None:
    if not 0 <= alpha < float("inf"):
        raise UserError(f"the length penalty's alpha must be 0 (no penalty) or more, got {alpha}")


class BeamStopping(ABC):
    """When the search for one prompt is over, though sequences could still grow."""

    @abstractmethod
    def open(
        self,
        alive: Float[Tensor, " b"],
        done: Float[Tensor, "b w"],
        best: int,
        now: Float[Tensor, ""],
        last: Float[Tensor, " b"],
    ) -> Bool[Tensor, " b"]:
        """Whether to go on, given the best growing log-probability, the finished scores (best first, minus infinity
        where there is none), how many are wanted, and the length penalty now and at the longest length allowed."""


@final
@dataclass(frozen=True)
class ExactStopping(BeamStopping):
    """Ends when nothing that still grows can enter the wanted best, whatever comes: the result of a full search."""

    def open(
        self,
        alive: Float[Tensor, " b"],
        done: Float[Tensor, "b w"],
        best: int,
        now: Float[Tensor, ""],
        last: Float[Tensor, " b"],
    ) -> Bool[Tensor, " b"]:
        # a log-probability only falls, and the penalty is largest at the longest length
        return alive / last > done[:, best - 1]


@final
@dataclass(frozen=True)
class LikelyStopping(BeamStopping):
    """Ends when the best growing sequence, scored as if it ended now, is worse than every finished one.

    The default of `transformers`: quicker than `ExactStopping`, and may miss a longer and better sequence where alpha >
    0."""

    def open(
        self,
        alive: Float[Tensor, " b"],
        done: Float[Tensor, "b w"],
        best: int,
        now: Float[Tensor, ""],
        last: Float[Tensor, " b"],
    ) -> Bool[Tensor, " b"]:
        return alive / now > done[:, -1]


@final
@dataclass(frozen=True)
class FullBeamStopping(BeamStopping):
    """Ends as soon as as many sequences are finished as the beam is wide, at the latest where `LikelyStopping` does."""

    def open(
        self,
        alive: Float[Tensor, " b"],
        done: Float[Tensor, "b w"],
        best: int,
        now: Float[Tensor, ""],
        last: Float[Tensor, " b"],
    ) -> Bool[Tensor, " b"]:
        return done[:, -1].isneginf() & LikelyStopping().open(alive, done, best, now, last)


class TokenChooser(ABC):
    """Chooses one token a row, for as long as one batch is decoded."""

    @abstractmethod
    def __call__(self, logits: Float[Tensor, "r v"], step: int) -> tuple[Int[Tensor, " r"], Float[Tensor, " r"]]:
        """The tokens, and one number a row that is finite if and only if there was a token to choose."""

    def take(self, rows: Int[Tensor, " n"]) -> None:
        """Go on with these rows only."""
        return


class StepChoice(ABC):
    """A way to choose that decides on each token at once and for good."""

    @abstractmethod
    def seeds(self, prompts: int) -> list[int]:
        """One seed a row: the answers to the first prompt, then those to the second, and so on, as many for each."""

    @abstractmethod
    def chooser(self, seeds: list[int], room: int, device: torch.device) -> TokenChooser:
        """A chooser for one row per seed and at most `room` steps."""


@final
@dataclass(frozen=True)
class GreedyChoice(StepChoice):
    """The likeliest token, always."""

    def seeds(self, prompts: int) -> list[int]:
        return [0] * prompts

    def chooser(self, seeds: list[int], room: int, device: torch.device) -> TokenChooser:
        return _Likeliest()


@final
@dataclass(frozen=True)
class SampledChoice(StepChoice):
    """A random token by its probability; `copies` answers to each prompt.

    Copy j of every prompt draws from a generator of its own, seeded with `seed` + j: an answer depends on its prompt
    and its seed, never on what else is in the batch. Without a seed a fresh one is drawn for every row. The
    seeds of each prompt begin `seed_stride` higher than those of the one before: 0 gives all the same.
    """

    seed: int | None = None
    copies: int = 1
    seed_stride: int = 0

    def __post_init__(self) -> None:
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.copies < 1:
            raise UserError(f"samples must be 1 or more, got {self.copies}")

    def seeds(self, prompts: int) -> list[int]:
        if self.seed is not None:
            return [self.seed + n * self.seed_stride + copy for n in range(prompts) for copy in range(self.copies)]
        return [int.from_bytes(os.urandom(6), "big") for _ in range(prompts * self.copies)]

    def chooser(self, seeds: list[int], room: int, device: torch.device) -> TokenChooser:
        draws = [torch.rand(room, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in seeds]
        return _Drawn(torch.stack(draws).clamp_(max=LARGEST).to(device))


@final
@dataclass(frozen=True)
class BeamSettings:
    """Search for the best sequence, keeping the `width` best beginnings; returns the `best` of them with scores.

    Growing sequences compete by log-probability, finished ones by log-probability / `penalty`; `until` decides when to
    end. A sequence that reaches the length limit counts as finished there.
    """

    width: int = 4
    penalty: LengthPenalty = field(default_factory=GNMTPenalty)
    best: int = 1
    until: BeamStopping = field(default_factory=ExactStopping)

    def __post_init__(self) -> None:
        if self.width < 1:
            raise UserError(f"beam must be 1 or wider, got {self.width}")
        if not 1 <= self.best <= self.width:
            raise UserError(f"best must be from 1 to the beam's width {self.width}, got {self.best}")


TokenChoice = StepChoice | BeamSettings
"""A way to choose: token by token, or by a search over sequences."""


@final
class _Likeliest(TokenChooser):
    def __call__(self, logits: Float[Tensor, "r v"], step: int) -> tuple[Int[Tensor, " r"], Float[Tensor, " r"]]:
        value, token = logits.max(-1)
        return token, value


@final
class _Drawn(TokenChooser):
    """By the inverse of the distribution function: one random number a token, drawn beforehand."""

    def __init__(self, draws: Float[Tensor, "r n"]) -> None:
        self.draws = draws

    def __call__(self, logits: Float[Tensor, "r v"], step: int) -> tuple[Int[Tensor, " r"], Float[Tensor, " r"]]:
        # summed in double precision: with many tokens the last ones would otherwise vanish
        mass = logits.softmax(-1, dtype=torch.float32).cumsum(-1, dtype=torch.float64)
        total = mass[:, -1:]
        token = torch.searchsorted(mass, self.draws[:, step : step + 1] * total, right=True)
        return token[:, 0].clamp_(max=logits.shape[-1] - 1), total[:, 0]

    def take(self, rows: Int[Tensor, " n"]) -> None:
        self.draws = self.draws.index_select(0, rows)
