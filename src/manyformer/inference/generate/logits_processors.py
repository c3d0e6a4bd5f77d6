"""Logits processors: frozen objects that change the logits of the next token before it is chosen."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.base.errors import UserError

LogitsFn = Callable[[Tensor, Tensor], Tensor]
"""A function from logits (r, v) and all previous tokens (r, t), padded on the left with -1, to new logits (r, v)."""

NEGATIVE_INFINITY = float("-inf")


class LogitsProcessor(ABC):
    """One change to logits or log-probabilities; a forbidden token gets minus infinity."""

    sampling: ClassVar[bool] = False
    """Whether it leaves the most likely token as it is, so that it has no effect on greedy decoding and beam search."""

    def prepare(self, vocab: int, device: torch.device) -> LogitsFn:
        """A function for `vocab` tokens on `device`, so that no step moves data to the device."""
        return self

    @abstractmethod
    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]: ...


@final
@dataclass(frozen=True)
class TemperatureProcessor(LogitsProcessor):
    """Divides logits by `value`: values below 1 sharpen the distribution, values above 1 flatten it."""

    value: float
    sampling = True

    def __post_init__(self) -> None:
        if not 0 < self.value < float("inf"):
            raise UserError(f"temperature must be a number above 0, got {self.value}; for the most likely token, 0")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        return logits / self.value


@final
@dataclass(frozen=True)
class TopKProcessor(LogitsProcessor):
    """Allows only the `k` most likely tokens and those that tie with the last of them (Fan et al. 2018)."""

    k: int
    sampling = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"top_k must be 1 or more, got {self.k}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        threshold = logits.topk(min(self.k, logits.shape[-1])).values[:, -1:]
        return logits.masked_fill(logits < threshold, NEGATIVE_INFINITY)


@final
@dataclass(frozen=True)
class TopPProcessor(LogitsProcessor):
    """Allows only the smallest set of most likely tokens with total probability `p` (Holtzman et al. 2020)."""

    p: float
    sampling = True

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.p}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        ordered, index = logits.sort(descending=True)
        probs = ordered.softmax(-1)
        # the mass in front of a token decides: the first token is always allowed, and so is the one that reaches p
        preceding_mass = probs.cumsum(-1) - probs
        allowed = ordered.masked_fill(preceding_mass >= self.p, NEGATIVE_INFINITY)
        return torch.full_like(logits, NEGATIVE_INFINITY).scatter(1, index, allowed)


@final
@dataclass(frozen=True)
class MinPProcessor(LogitsProcessor):
    """Allows only tokens with at least `p` times the probability of the most likely one (Nguyen et al. 2024)."""

    p: float
    sampling = True

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise UserError(f"min_p must be above 0 and at most 1, got {self.p}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        probs = logits.softmax(-1)
        return logits.masked_fill(probs < self.p * probs.amax(-1, keepdim=True), NEGATIVE_INFINITY)


@final
@dataclass(frozen=True)
class RepetitionPenaltyProcessor(LogitsProcessor):
    """Lowers the logits of all previous tokens: positive ones are divided by `penalty`, negative ones multiplied.

    CTRL (Keskar et al. 2019, section 4.1), with the sign rule of later implementations; the prompt is included.
    """

    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.penalty < float("inf"):
            raise UserError(f"repetition_penalty must be above 0 (1 changes nothing), got {self.penalty}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        penalized = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(_is_present(history, logits), penalized, logits)


@final
@dataclass(frozen=True)
class NoRepeatNGramProcessor(LogitsProcessor):
    """Forbids every token that would repeat an n-gram of the row (Paulus et al. 2018)."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UserError(f"no_repeat_ngram must be 1 or more, got {self.n}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        length = history.shape[1]
        if length < self.n:
            return logits
        # (r, t - n + 1, n): all n-grams of a row, of which those that begin as the row ends forbid their last token
        ngrams = history.unfold(1, self.n, 1)
        prefix = history[:, length + 1 - self.n :]
        matches = (ngrams[..., :-1] == prefix[:, None]).all(-1)
        return logits.masked_fill(_is_present(ngrams[..., -1].where(matches, -1), logits), NEGATIVE_INFINITY)


@final
@dataclass(frozen=True)
class BanTokensProcessor(LogitsProcessor):
    """Forbids the tokens `ids`, such as the padding and start tokens."""

    ids: tuple[int, ...]

    def prepare(self, vocab: int, device: torch.device) -> LogitsFn:
        if invalid_ids := [token for token in self.ids if not 0 <= token < vocab]:
            raise UserError(f"cannot ban token {invalid_ids[0]}: the model's tokens are 0 to {vocab - 1}")
        bias = torch.zeros(vocab)
        bias[list(self.ids)] = NEGATIVE_INFINITY
        bias = bias.to(device)
        return lambda logits, history: logits + bias

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        return self.prepare(logits.shape[-1], logits.device)(logits, history)


@final
@dataclass(frozen=True)
class ForcedTokens:
    """The first and the last token of every text, where a model was trained with fixed ones; None for any."""

    first: int | None = None
    last: int | None = None

    def __call__(self, logits: Float[Tensor, "r v"], step: int, limits: Int[Tensor, " r"]) -> Float[Tensor, "r v"]:
        """The logits of new token `step`, counted from 1; `limits` are the most new tokens of each row."""
        if self.first is not None and step == 1:
            logits = _only(self.first, logits)
        if self.last is not None:
            logits = torch.where((limits == step)[:, None], _only(self.last, logits), logits)
        return logits


def _only(token: int, logits: Float[Tensor, "r v"]) -> Float[Tensor, "r v"]:
    """Logits that allow one token alone."""
    forced = torch.full_like(logits, NEGATIVE_INFINITY)
    forced[:, token] = 0
    return forced


def _is_present(tokens: Int[Tensor, "r t"], logits: Float[Tensor, "r v"]) -> Tensor:
    """Whether each token of the vocabulary occurs in each row of `tokens`, as booleans (r, v); -1 is ignored."""
    rows, vocab = logits.shape
    # one additional column takes the entries of -1
    present = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device)
    return present.scatter_(1, tokens.where(tokens >= 0, vocab), value=True)[:, :vocab]
