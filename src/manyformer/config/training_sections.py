"""How a run learns: optimiser, learning rate, batches, limits, evaluation and checkpoints."""

from typing import Annotated, Literal

from pydantic import Field

from manyformer.config.section import (
    ConfigSection,
    Fraction,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SettingConflict,
    one_of_forms,
)

# Steps of warm-up where none are given; of a run shorter than ten times as many, a tenth is warm-up.
WARMUP = {"noam": 4000, "cosine": 100, "constant": 100}
Betas = Annotated[tuple[Fraction, Fraction], one_of_forms("two numbers from 0 up to 1, such as [0.9, 0.98]")]


class AdamWConfig(ConfigSection):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    name: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay."""
    lr: PositiveFloat | None = None
    """Peak learning rate, 1e-3 when left out; null with the noam schedule, which sets its own."""
    # 0.98 averages the squared gradient over 50 steps instead of the 1000 of 0.999: a run of a few hundred or thousand
    # steps forgets its first, large gradients in time, and large batches spike less (RoBERTa, arXiv:1907.11692, 3.1).
    betas: Betas = (0.9, 0.98)
    """Decay of the running means of the gradient and of its square, for each step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square, against division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of the weight matrices, times the learning rate each step; biases, norms and embeddings do not decay."""
    clip: PositiveFloat | None = 1.0
    """Largest norm of the whole gradient; null means no clipping."""


class AdamConfig(ConfigSection):
    """Adam (Kingma and Ba 2015) with the settings of Vaswani et al. 2017, section 5.3."""

    name: Literal["adam"] = "adam"
    """Adam without weight decay."""
    lr: PositiveFloat | None = None
    """Peak learning rate, 1e-3 when left out; null with the noam schedule, which sets its own."""
    betas: Betas = (0.9, 0.98)
    """Decay of the running means of the gradient and of its square, for each step."""
    eps: PositiveFloat = 1e-9
    """Added to the root of the mean square, against division by zero."""
    clip: PositiveFloat | None = None
    """Largest norm of the whole gradient; null means no clipping."""


class NoamSchedule(ConfigSection):
    """Rate = scale * width^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, section 5.3)."""

    name: Literal["noam"] = "noam"
    """Linear rise, then the inverse root of the step; the peak follows from the model's width."""
    warmup: PositiveInt | None = None
    """Steps of the linear rise; null means 4000 as in the paper, or a tenth of a run of fewer than 40,000 steps."""
    scale: PositiveFloat = 1.0
    """Factor on the whole schedule."""
    width: PositiveInt | None = None
    """The width in the formula; null takes the model's `dim`."""


class CosineSchedule(ConfigSection):
    """Linear rise to `optim.lr`, then half a cosine down (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

    name: Literal["cosine"] = "cosine"
    """Linear rise to the peak, then half a cosine down."""
    warmup: NonNegativeInt | None = None
    """Steps of the linear rise; null means 100, or a tenth of a run of fewer than 1000 steps."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Where it ends, as a fraction of the peak."""
    steps: PositiveInt | None = None
    """The step at which it reaches its end; null means the end of the run, by the limit that is nearest."""

    def conflicts(self) -> list[SettingConflict]:
        if self.steps is None or self.warmup is None or self.warmup < self.steps:
            return []
        what = f"{self.warmup} steps of warm-up leave nothing of schedule.steps {self.steps}"
        return [SettingConflict(("warmup",), what, ("schedule.steps",))]


class ConstantSchedule(ConfigSection):
    """Linear rise to `optim.lr`, then the same rate for ever."""

    name: Literal["constant"] = "constant"
    """Linear rise to the peak, and no fall."""
    warmup: NonNegativeInt | None = None
    """Steps of the linear rise; null means 100, or a tenth of a run of fewer than 1000 steps."""


class LossConfig(ConfigSection):
    """What is minimised besides a model's own auxiliary losses."""

    smoothing: Fraction = 0.0
    """Label smoothing: the probability spread over the whole vocabulary (Vaswani et al. 2017, section 5.4: 0.1)."""


class BatchConfig(ConfigSection):
    """How much one step sees."""

    tokens: PositiveInt = 8192
    """Tokens of one forward and backward pass, padding counted, all processes together."""
    accumulate: PositiveInt = 1
    """Passes whose gradients are summed before a step is made."""


class LimitsConfig(ConfigSection):
    """When a run ends: the first limit that is reached."""

    steps: PositiveInt | None = None
    """Optimiser steps."""
    epochs: PositiveFloat | None = None
    """Passes over the training data."""
    tokens: PositiveInt | None = None
    """Target tokens learned from."""
    minutes: PositiveFloat | None = None
    """Minutes of training, added up over interruptions."""
    processor: PositiveFloat | None = None
    """Minutes that processors worked on it, those of all threads and processes together: what else the machine does
    takes nothing from them."""

    def conflicts(self) -> list[SettingConflict]:
        if any(limit is not None for limit in (self.steps, self.epochs, self.tokens, self.minutes, self.processor)):
            return []
        return [
            SettingConflict((), "a run needs an end: set at least one of steps, epochs, tokens, minutes and processor")
        ]


class EvaluateConfig(ConfigSection):
    """When and how the validation data is scored."""

    every: PositiveInt | None = 200
    """Steps between evaluations; null means at the end alone."""
    metric: Literal["loss", "accuracy"] = "loss"
    """What decides which checkpoint is best, and when to stop early."""
    patience: PositiveInt | None = None
    """Stop after so many evaluations in a row without a better one; null means never."""
    batches: PositiveInt | None = None
    """Score so many batches of the validation data, always the same; null means all."""

    def conflicts(self) -> list[SettingConflict]:
        if self.patience is None or self.every is not None:
            return []
        return [
            SettingConflict(
                ("patience",), "needs evaluate.every: nothing is scored before the end", ("evaluate.every",)
            )
        ]


class SaveConfig(ConfigSection):
    """When checkpoints are written and which are kept."""

    every: PositiveInt = 200
    """Steps between checkpoints; one more is written at the end."""
    last: PositiveInt = 2
    """How many of the latest checkpoints are kept."""
    best: NonNegativeInt = 1
    """How many of the best checkpoints, by `evaluate.metric`, are kept besides."""
    average: NonNegativeInt = 0
    """Average so many of the latest checkpoints into the final model; 0 means take the best, or else the last."""

    def conflicts(self) -> list[SettingConflict]:
        if self.average <= self.last:
            return []
        what = f"{self.average} checkpoints cannot be averaged where save.last keeps {self.last}; set save.last too"
        return [SettingConflict(("average",), what, ("save.last",))]


class LogConfig(ConfigSection):
    """What is written while training."""

    every: PositiveInt = 10
    """Steps between two rows of the metrics."""


OptimConfig = AdamWConfig | AdamConfig
ScheduleConfig = NoamSchedule | CosineSchedule | ConstantSchedule
