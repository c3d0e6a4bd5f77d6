"""What may be done to the logits of the next token before one is chosen; each change is a small frozen object."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.errors import UserError

LogitsFn = Callable[[Tensor, Tensor], Tensor]
"""From logits (r, v) and the tokens so far (r, t), -1 where a row has none yet, to new logits (r, v)."""

NEVER = float("-inf")


class LogitsProcessor(ABC):
    """One change to logits or log-probabilities; a token that must not come gets minus infinity."""

    sampling: ClassVar[bool] = False
    """Whether it only changes how likely tokens are, never which is the best: of no use to a search for the best."""

    def ready(self, vocab: int, device: torch.device) -> LogitsFn:
        """The change prepared for `vocab` tokens on `device`, so that nothing is moved there at each step."""
        return self

    @abstractmethod
    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]: ...


@final
@dataclass(frozen=True)
class TemperatureProcessor(LogitsProcessor):
    """Divides logits by `value`: below 1 sharpens the distribution, above 1 flattens it."""

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
    """Keeps the `k` most likely tokens, and those that tie with the last of them (Fan et al. 2018)."""

    k: int
    sampling = True

    def __post_init__(self) -> None:
        if self.k < 1:
            raise UserError(f"top_k must be 1 or more, got {self.k}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        least = logits.topk(min(self.k, logits.shape[-1])).values[:, -1:]
        return logits.masked_fill(logits < least, NEVER)


@final
@dataclass(frozen=True)
class TopPProcessor(LogitsProcessor):
    """Keeps the smallest set of most likely tokens that together have probability `p` (Holtzman et al. 2020)."""

    p: float
    sampling = True

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.p}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        ordered, index = logits.sort(descending=True)
        share = ordered.softmax(-1)
        # what lies before a token decides: the first is always kept, and the one that reaches p too
        before = share.cumsum(-1) - share
        return torch.full_like(logits, NEVER).scatter(1, index, ordered.masked_fill(before >= self.p, NEVER))


@final
@dataclass(frozen=True)
class MinPProcessor(LogitsProcessor):
    """Keeps tokens that have at least `p` times the probability of the most likely one (Nguyen et al. 2024)."""

    p: float
    sampling = True

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise UserError(f"min_p must be above 0 and at most 1, got {self.p}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        share = logits.softmax(-1)
        return logits.masked_fill(share < self.p * share.amax(-1, keepdim=True), NEVER)


@final
@dataclass(frozen=True)
class RepetitionPenaltyProcessor(LogitsProcessor):
    """Makes tokens that came before less likely: positive logits are divided by `penalty`, negative ones multiplied.

    CTRL (Keskar et al. 2019, section 4.1), with the sign rule that everybody uses since; the prompt counts.
    """

    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.penalty < float("inf"):
            raise UserError(f"repetition_penalty must be above 0 (1 changes nothing), got {self.penalty}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        changed = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(_marked(history, logits), changed, logits)


@final
@dataclass(frozen=True)
class NoRepeatNGramProcessor(LogitsProcessor):
    """Forbids every token that would complete an n-gram of the row for the second time (Paulus et al. 2018)."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise UserError(f"no_repeat_ngram must be 1 or more, got {self.n}")

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        length = history.shape[1]
        if length < self.n:
            return logits
        windows = history.unfold(1, self.n, 1)
        begun = history[:, length + 1 - self.n :]
        same = (windows[..., :-1] == begun[:, None]).all(-1)
        return logits.masked_fill(_marked(windows[..., -1].where(same, -1), logits), NEVER)


@final
@dataclass(frozen=True)
class BanTokensProcessor(LogitsProcessor):
    """Forbids the tokens `ids`, such as padding and the beginning of a sequence."""

    ids: tuple[int, ...]

    def ready(self, vocab: int, device: torch.device) -> LogitsFn:
        if wrong := [token for token in self.ids if not 0 <= token < vocab]:
            raise UserError(f"cannot ban token {wrong[0]}: the model's tokens are 0 to {vocab - 1}")
        banned = torch.zeros(vocab)
        banned[list(self.ids)] = NEVER
        banned = banned.to(device)
        return lambda logits, history: logits + banned

    def __call__(self, logits: Float[Tensor, "r v"], history: Int[Tensor, "r t"]) -> Float[Tensor, "r v"]:
        return self.ready(logits.shape[-1], logits.device)(logits, history)


def _marked(tokens: Int[Tensor, "r t"], logits: Float[Tensor, "r v"]) -> Tensor:
    """Which of the vocabulary occur in each row of `tokens`, as booleans (r, v); -1 marks nothing."""
    rows, vocab = logits.shape
    # one column more than there are tokens takes what marks nothing
    seen = torch.zeros(rows, vocab + 1, dtype=torch.bool, device=logits.device)
    return seen.scatter_(1, tokens.where(tokens >= 0, vocab), value=True)[:, :vocab]
