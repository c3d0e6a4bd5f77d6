"""Which drafted tokens stand, so that a text is what the model alone would have written."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.inference.generate.decoding import MAX_UNIFORM
from manyformer.inference.generate.drafters import DraftedToken


class AcceptanceRule(ABC):
    """How tokens are drafted, and which of them stand after the model has read them."""

    @abstractmethod
    def draft(self, logits: Float[Tensor, "1 v"]) -> DraftedToken:
        """Draft one token by the logits of a drafter."""

    @abstractmethod
    def verify(self, logits: Float[Tensor, "n v"], drafts: list[DraftedToken]) -> list[int]:
        """The drafts that stand, and one token more, by the model's logits of each draft and of what follows them."""


@final
class GreedyAcceptance(AcceptanceRule):
    """A draft stands where it is the most likely token; the token after them is the most likely one."""

    def draft(self, logits: Float[Tensor, "1 v"]) -> DraftedToken:
        return DraftedToken(int(logits.argmax()))

    def verify(self, logits: Float[Tensor, "n v"], drafts: list[DraftedToken]) -> list[int]:
        # one wait for a GPU
        best: list[int] = logits.argmax(-1).tolist()
        for count, draft in enumerate(drafts):
            if draft.token != best[count]:
                return best[: count + 1]
        return best


@final
class SampledAcceptance(AcceptanceRule):
    """A draft x that was sampled from q stands with probability min(1, p(x) / q(x)), for the model's distribution p.

    In place of the first one that does not, a token is sampled from max(p - q, 0), normalized; after the last, from p
    (Leviathan et al. 2023, arXiv:2211.17192, appendix A.1): every token is distributed as p. Random numbers are those
    of the row's generator: a seed repeats a text with the same drafts, and gives another text without them."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def draft(self, logits: Float[Tensor, "1 v"]) -> DraftedToken:
        probabilities = _probabilities(logits)[0]
        return DraftedToken(self._sample(probabilities), probabilities)

    def verify(self, logits: Float[Tensor, "n v"], drafts: list[DraftedToken]) -> list[int]:
        probabilities = _probabilities(logits)
        tokens: list[int] = []
        for draft, p in zip(drafts, probabilities):
            likelihood = float(p[draft.token])
            proposed = 1.0 if draft.probabilities is None else float(draft.probabilities[draft.token])
            if self._uniform() * proposed < likelihood:
                tokens.append(draft.token)
                continue
            return [*tokens, self._sample(_residual(p, draft))]
        return [*tokens, self._sample(probabilities[len(drafts)])]

    def _sample(self, probabilities: Float[Tensor, " v"]) -> int:
        cumulative = probabilities.cumsum(-1)
        token = torch.searchsorted(cumulative, self._uniform() * cumulative[-1], right=True)
        # a product that is rounded up to the sum would be behind the last token
        return min(int(token), len(probabilities) - 1)

    def _uniform(self) -> float:
        return torch.rand((), generator=self.generator, dtype=torch.float64).clamp_(max=MAX_UNIFORM).item()


def _probabilities(logits: Float[Tensor, "n v"]) -> Float[Tensor, "n v"]:
    # in float64, and so on the host, where the generator is
    return logits.cpu().double().softmax(-1)


def _residual(p: Float[Tensor, " v"], draft: DraftedToken) -> Float[Tensor, " v"]:
    """What the distribution of the model has more than that of the draft."""
    if draft.probabilities is None:
        rest = p.clone()
        rest[draft.token] = 0.0
    else:
        rest = (p - draft.probabilities).clamp(min=0.0)
    # equal distributions but for rounding: no draft of them would have been refused
    return rest if rest.any() else p
