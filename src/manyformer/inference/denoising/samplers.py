"""In which order a masked diffusion makes hidden tokens visible: which of the predictions of a step are accepted.

An accepted token never changes again."""

from abc import ABC, abstractmethod
from typing import NamedTuple, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor


class SamplingStep(NamedTuple):
    """One step of filling: the tokens that are hidden, a uniform number for each, and how probable its prediction is.

    It is the step `number`, from 0, of `steps`."""

    is_hidden: Bool[Tensor, "b l"]
    draws: Float[Tensor, "b l"]
    confidence: Float[Tensor, "b l"]
    number: int
    steps: int


class Sampler(ABC):
    """Chooses the tokens that a step makes visible; the last step accepts all that are hidden."""

    def step_count(self, hidden: int, wanted: int | None) -> int:
        """The number of steps for so many hidden tokens, of which `wanted` were asked for."""
        return hidden if wanted is None else wanted

    @abstractmethod
    def accept(self, step: SamplingStep) -> Bool[Tensor, "b l"]:
        """Which hidden tokens become what was predicted."""


@final
class AncestralSampler(Sampler):
    """Each hidden token becomes visible with the probability (p_t - p_s) / p_t (Sahoo et al. 2024, section 3.2).

    The times t and s of a step are those of an even grid. With a p that is linear in time, as that of MDLM, the
    probability is 1 / (number of steps left)."""

    def accept(self, step: SamplingStep) -> Bool[Tensor, "b l"]:
        return step.is_hidden & (step.draws * (step.steps - step.number) < 1)


@final
class FirstHittingSampler(Sampler):
    """One hidden token of each row at a time, uniformly chosen (Zheng et al. 2024, arXiv:2409.02908, section 4).

    The same distribution as an ancestral sampler of infinitely many steps. The paper also draws the time at which the
    token becomes visible, which no model here is told."""

    def step_count(self, hidden: int, wanted: int | None) -> int:
        return hidden

    def accept(self, step: SamplingStep) -> Bool[Tensor, "b l"]:
        return highest(step.draws.masked_fill(~step.is_hidden, -1), step.is_hidden, torch.ones_like(step.draws[:, :1]))


@final
class LowConfidenceSampler(Sampler):
    """The most probable predictions of each step, as many in each (Nie et al. 2025, section 2.4: remasking).

    What remains hidden are predictions of this step of low confidence. Of a remainder the first steps accept one more
    each. The confidence of a prediction is its probability without a temperature."""

    def accept(self, step: SamplingStep) -> Bool[Tensor, "b l"]:
        remaining = step.is_hidden.sum(1, keepdim=True)
        count = (remaining / (step.steps - step.number)).ceil()
        return highest(step.confidence.masked_fill(~step.is_hidden, -1), step.is_hidden, count)


def highest(
    values: Float[Tensor, "b l"], is_hidden: Bool[Tensor, "b l"], count: Float[Tensor, "b 1"]
) -> Bool[Tensor, "b l"]:
    """The hidden tokens with the `count` highest values of their row; of equal ones the first."""
    rank = values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return (rank < count) & is_hidden


SAMPLERS: dict[str, Sampler] = {
    "ancestral": AncestralSampler(),
    "first-hitting": FirstHittingSampler(),
    "low-confidence": LowConfidenceSampler(),
}
