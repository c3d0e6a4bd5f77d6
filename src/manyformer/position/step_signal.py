"""Where a token is, and how often it was worked on: signals for layers that run again and again."""

import math
from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import TokenPositions
from manyformer.position.absolute import AbsolutePosition
from manyformer.position.sinusoid_table import SinusoidLayout, check_waves, sinusoid_table


class StepSignal(nn.Module, ABC):
    """A vector for each step of a recurrent layer, the first being step 0."""

    @abstractmethod
    def forward(self, step: int) -> Float[Tensor, " d"]: ...


@final
class SinusoidalStepSignal(StepSignal):
    """The sinusoids of positions, of the step's number (Dehghani et al. 2019, section 2.1).

    The paper counts steps from 1, Tensor2Tensor from 0: `first` is the number of step 0.
    """

    def __init__(self, dim: int, *, layout: SinusoidLayout = "interleaved", first: int = 1) -> None:
        super().__init__()
        check_waves(dim, layout, "SinusoidSteps")
        self.dim, self.first = dim, first
        self.layout: SinusoidLayout = layout
        # says where the model is, and holds nothing
        self.register_buffer("device_marker", torch.zeros((), dtype=torch.long), persistent=False)
        self.device_marker: Tensor

    def forward(self, step: int) -> Float[Tensor, " d"]:
        return sinusoid_table(self.device_marker + (step + self.first), self.dim, self.layout)


@final
class LearnedStepSignal(StepSignal):
    """A learned vector for each of `max_length` steps, as Tensor2Tensor's Universal Transformer has it by default.

    Kept with a deviation of 1/sqrt(dim) and multiplied by sqrt(dim), as there, so that it starts as N(0, 1). Raises
    ValueError for a step beyond the table.
    """

    def __init__(self, dim: int, max_length: int) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"LearnedStepSignal: longest ({max_length}) must be at least 1 step")
        self.weight = nn.Parameter(torch.randn(max_length, dim) / math.sqrt(dim))

    def forward(self, step: int) -> Float[Tensor, " d"]:
        if step >= len(self.weight):
            raise ValueError(f"step {step} does not exist: the table was built for longest={len(self.weight)} steps")
        return self.weight[step] * math.sqrt(self.weight.shape[1])


@final
class NoStepSignal(StepSignal):
    """No signal: all steps look the same, and there may be more of them than were ever taken in training."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        # holds nothing; says where the model is
        self.register_buffer("nothing", torch.zeros(dim), persistent=False)
        self.nothing: Tensor

    def forward(self, step: int) -> Float[Tensor, " d"]:
        return self.nothing


@final
class PositionStepSignal(nn.Module):
    """The two-dimensional signal of the Universal Transformer: a position's vector plus a step's, added at every step.

    Dehghani et al. 2019, section 2.1: with `SinusoidalPosition` and `SinusoidalStepSignal` channel 2k of token i at
    step t gets sin(i r_k) + sin(t r_k), and channel 2k + 1 the cosines; both are summed, not concatenated, and part of
    the residual stream. Tensor2Tensor's own is `PositionStepSignal(SinusoidalPosition(dim, layout="timing"),
    LearnedStepSignal(dim, steps))`."""

    def __init__(self, position: AbsolutePosition, steps: StepSignal) -> None:
        super().__init__()
        self.position, self.steps = position, steps
        self.max_length = position.max_length

    def forward(self, x: Float[Tensor, "b l d"], positions: TokenPositions, step: int) -> Float[Tensor, "b l d"]:
        """The stream before step number `step`, the first being 0."""
        return self.at_step(x, self.positions(x, positions), step)

    def positions(self, x: Float[Tensor, "b l d"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        """The vectors of the positions, which are the same at every step."""
        return self.position.embed(torch.zeros_like(x), positions)

    def at_step(
        self, x: Float[Tensor, "b l d"], positions: Float[Tensor, "b l d"], step: int
    ) -> Float[Tensor, "b l d"]:
        """The stream with the vectors of its positions and that of the step."""
        row: Tensor = self.steps(step)
        return x + positions + row.to(x.dtype)
