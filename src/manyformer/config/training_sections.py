"""Training sections of a run: optimizer, learning rate, batches, limits, evaluation, checkpoints and logging."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, ValidatorFunctionWrapHandler, WrapValidator

from manyformer.config.section import (
    ConfigSection,
    Fraction,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    SettingConflict,
    TupleOrText,
    accepted_forms,
)

# Default steps of warm-up; in a run shorter than ten times as many, a tenth of the steps, or of its other limits.
DEFAULT_WARMUP = {"noam": 4000, "cosine": 100, "constant": 100, "wsd": 100}
MAX_AHEAD = 64
"""The most batches that are read ahead: more only take memory."""
Betas = Annotated[tuple[Fraction, Fraction], accepted_forms("two numbers from 0 up to 1, such as [0.9, 0.98]")]


OptimizerKind = Literal["adamw", "adam", "adagrad", "adadelta", "muon", "sgd", "lion", "adafactor"]


class ParameterGroup(ConfigSection):
    """Weights, by a pattern of their names, that are trained differently."""

    match: PathText
    """The names of weights, such as `body.0.*`: a glob of the whole name or of its end after a dot, or a regular
    expression in slashes, `/norm|bias/`. The first pattern of the list that matches a weight decides. One that decides
    nothing is refused."""
    lr_scale: PositiveFloat = 1.0
    """The factor on the learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """The weight decay (L2 penalty in `adam` and `sgd`) in place of the optimizer's, also for weights that do not decay
    by themselves; null means by rule."""
    optimizer: Literal["muon", "adamw"] | None = None
    """With `optim.name=muon`: which of its two optimizers trains these weights; null means by rule."""

    def conflicts(self) -> Iterator[SettingConflict]:
        pattern = self.match
        if len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/"):
            try:
                re.compile(pattern[1:-1])
            except re.error as error:
                yield SettingConflict(("match",), f"'{pattern}' is no regular expression: {error}", ())


def _as_groups(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    # YAML has only lists; what is wrong inside of a group is told as it is
    return handler(tuple(value) if isinstance(value, list) else value)


# shown by the help
_as_groups.__doc__ = "a list of groups: match, then lr_scale, weight_decay or optimizer"


class OptimizerSection(ConfigSection):
    """The settings of all optimizers."""

    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Layer-wise learning rates (ELECTRA, arXiv:2003.10555): that of the head times this once for each layer from the
    top down, and once more for the embedding; null means one rate for all. Needs a model of one stack of layers."""
    nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose gradient is not finite, or too large for the optimizer to square: `stop` ends the run, and names the
    weight; `skip` leaves weights and optimizer as they are, goes on, and counts such steps."""
    groups: Annotated[tuple[ParameterGroup, ...], WrapValidator(_as_groups)] = ()
    """Weights with a rate, a decay or (with Muon) an optimizer of their own, such as
    `[{match: "*norm*", lr_scale: 0.1}, {match: "head.*", weight_decay: 0}]`."""
    max_grad_value: PositiveFloat | None = None
    """Largest absolute value of a number of the gradient, before any norm is clipped; null means no limit."""


class AdamWConfig(OptimizerSection):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv:1711.05101)."""

    name: Literal["adamw"] = "adamw"
    """Adam with decoupled weight decay."""
    lr: PositiveFloat | None = None
    """Peak learning rate, 1e-3 when left out; null with the noam schedule, which sets its own."""
    # 0.98 averages the squared gradient over 50 steps instead of the 1000 of 0.999: a run of a few hundred or thousand
    # steps discards its first, large gradients in time, and large batches spike less (RoBERTa, arXiv:1907.11692, 3.1).
    betas: Betas = (0.9, 0.98)
    """Decay of the running means of the gradient and of its square, for each step."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the mean square, against division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of the weights that multiply activations (matrices and convolutions), times the learning rate each step;
    biases, norms, lookup tables, positions and learned tokens do not decay."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the full gradient; null means no clipping."""


class AdamConfig(OptimizerSection):
    """Adam (Kingma and Ba 2015) with the settings of Vaswani et al. 2017, section 5.3."""

    name: Literal["adam"] = "adam"
    """Adam without weight decay."""
    lr: PositiveFloat | None = None
    """Peak learning rate, 1e-3 when left out; null with the noam schedule, which sets its own."""
    betas: Betas = (0.9, 0.98)
    """Decay of the running means of the gradient and of its square, for each step."""
    eps: PositiveFloat = 1e-9
    """Added to the root of the mean square, against division by zero."""
    l2: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty: this times half the squared norm of the weight matrices is added to the loss of a step."""
    max_grad_norm: PositiveFloat | None = None
    """Largest norm of the full gradient; null means no clipping."""


class AdagradConfig(OptimizerSection):
    """Adagrad (Duchi et al. 2011) with the settings of Sukhbaatar et al. 2019 (arXiv:1905.07799), section 3."""

    name: Literal["adagrad"] = "adagrad"
    """Adagrad: steps divided by the root of the sum of all squared gradients so far."""
    lr: PositiveFloat | None = None
    """Peak learning rate, 0.07 when left out; null with the noam schedule, which sets its own."""
    eps: PositiveFloat = 1e-10
    """Added to the root of the sum, against division by zero."""
    max_weight_grad_norm: PositiveFloat | None = 0.03
    """Largest norm of the gradient of each weight by itself; null means no clipping."""
    max_grad_norm: PositiveFloat | None = None
    """Largest norm of the full gradient; null means no clipping."""


class AdadeltaConfig(OptimizerSection):
    """Adadelta (Zeiler 2012, arXiv:1212.5701) with the settings of Bahdanau et al. 2015, appendix B.2."""

    name: Literal["adadelta"] = "adadelta"
    """Adadelta: steps as large as the mean of earlier steps, without a learning rate of their own."""
    lr: PositiveFloat | None = None
    """Factor on all steps, 1 when left out; null with the noam schedule, which sets its own."""
    rho: Fraction = 0.95
    """Decay of the running means of squared gradients and of squared steps, for each step."""
    eps: PositiveFloat = 1e-6
    """Added to both means, which decides the size of the first steps."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the full gradient; null means no clipping."""


class MuonConfig(OptimizerSection):
    """Muon (Jordan et al. 2024) for the matrices of hidden layers, and AdamW for all other weights."""

    name: Literal["muon"] = "muon"
    """Momentum, orthogonalized, for the matrices of hidden layers; AdamW for embeddings, heads, vectors and gates."""
    lr: PositiveFloat | None = None
    """Peak learning rate of the matrices: 0.02 when left out, with `match_rms_adamw` 0.003."""
    scale: Literal["original", "match_rms_adamw"] = "original"
    """The factor on the step of a matrix: `original` is the root of rows / columns, at least 1; `match_rms_adamw` makes
    the root mean square of all steps 0.2, about that of AdamW (Liu et al. 2025, arXiv:2502.16982)."""
    momentum: Fraction = 0.95
    """Decay of the running mean of the gradient, for each step."""
    nesterov: bool = True
    """Orthogonalize the momentum of the next step instead of that of this one."""
    ns_steps: Annotated[PositiveInt, Field(le=20)] = 5
    """Steps of the iteration that orthogonalizes."""
    ns_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The arithmetic of that iteration: auto means bfloat16 on a GPU, and float32 on a CPU, where it is faster."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decay of the matrices, times their learning rate each step; null means 0.005 with `original` and 0.03 with
    `match_rms_adamw`: as much in a step, at the learning rates by default, as AdamW's 0.1 at 0.001."""
    normuon: Fraction | None = None
    """NorMuon (Li et al. 2025, arXiv:2510.05491): divide the rows of a step by the root of the running mean of their
    squares, which decays by this, such as 0.95; null means not."""
    cautious_decay: bool = False
    """Decay only those numbers of the matrices that the step moves towards 0 as well (arXiv:2510.12402)."""
    adamw_lr: PositiveFloat = 0.003
    """Peak learning rate of all other weights."""
    betas: Betas = (0.9, 0.98)
    """Decay of AdamW's running means of the gradient and of its square, for each step."""
    eps: PositiveFloat = 1e-8
    """Added to AdamW's root of the mean square, against division by zero."""
    adamw_weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decay of those other weights that multiply activations, times `adamw_lr` each step."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the full gradient; null means no clipping."""

    @property
    def decay(self) -> float:
        """The decay of the matrices."""
        if self.weight_decay is not None:
            return self.weight_decay
        return 0.005 if self.scale == "original" else 0.03


class SGDConfig(OptimizerSection):
    """Stochastic gradient descent with momentum, as torch computes it."""

    name: Literal["sgd"] = "sgd"
    """Gradient descent with momentum: steps as large as the gradient."""
    lr: PositiveFloat | None = None
    """Peak learning rate, 0.1 when left out; null with the noam schedule, which sets its own."""
    momentum: Fraction = 0.9
    """The share of the last step that is made again; 0 means none."""
    nesterov: bool = False
    """Look ahead by the momentum (Sutskever et al. 2013)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """L2 penalty of the weights that multiply activations: this times the weight is added to its gradient."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the full gradient; null means no clipping."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.nesterov and self.momentum == 0:
            yield SettingConflict(("nesterov",), "needs optim.momentum above 0", ("optim.momentum",))


class LionConfig(OptimizerSection):
    """Lion (Chen et al. 2023, arXiv:2302.06675): steps of the sign of the momentum."""

    name: Literal["lion"] = "lion"
    """Every number moves by the learning rate, in the direction of the momentum."""
    lr: PositiveFloat | None = None
    """Peak learning rate, 1e-4 when left out, a tenth of AdamW's; null with the noam schedule, which sets its own."""
    betas: Annotated[tuple[Fraction, Fraction], accepted_forms("two numbers from 0 up to 1, such as [0.9, 0.99]")] = (
        0.9,
        0.99,
    )
    """The share of the momentum in a step, and its decay."""
    weight_decay: Annotated[float, Field(ge=0)] = 1.0
    """Decay of the weights that multiply activations, times the learning rate each step: ten times AdamW's."""
    max_grad_norm: PositiveFloat | None = 1.0
    """Largest norm of the full gradient; null means no clipping."""


class AdafactorConfig(OptimizerSection):
    """Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), as torch computes it: without momentum."""

    name: Literal["adafactor"] = "adafactor"
    """Adam's division with one mean for each row and each column of a matrix, and steps relative to the weight."""
    lr: PositiveFloat | None = None
    """Largest step, as a fraction of the root mean square of the weight: 0.01 when left out; at step t at most
    1 / sqrt(t)."""
    beta2_decay: Annotated[float, Field(lt=0)] = -0.8
    """The running means decay by 1 - t to this power at step t."""
    min_rms: PositiveFloat = 1e-3
    """The root mean square of a weight counts as at least this."""
    clip_threshold: Annotated[float, Field(ge=1)] = 1.0
    """Largest root mean square of a step, before it is multiplied by the rate and the weight's."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decay of the weights that multiply activations, times the learning rate each step."""
    max_grad_norm: PositiveFloat | None = None
    """Largest norm of the full gradient; null means no clipping."""


DEFAULT_LR = {
    "adamw": 1e-3,
    "adam": 1e-3,
    "adagrad": 0.07,
    "adadelta": 1.0,
    "muon": 0.02,
    "sgd": 0.1,
    "lion": 1e-4,
    "adafactor": 0.01,
}
"""The peak learning rate of each optimizer where none is set."""

MATCHED_LR = 0.003
"""That of Muon where its steps have the size of AdamW's."""


class NoamSchedule(ConfigSection):
    """Rate = scale * width^-0.5 * min(step^-0.5, step * warmup^-1.5) (Vaswani et al. 2017, section 5.3)."""

    name: Literal["noam"] = "noam"
    """Linear warm-up, then the inverse root of the step; the peak follows from the model's width."""
    warmup: PositiveInt | None = None
    """Steps of linear warm-up; null means 4000 as in the paper, or a tenth of a run that ends before 40,000 steps."""
    scale: PositiveFloat = 1.0
    """Factor on the whole schedule."""
    width: PositiveInt | None = None
    """The width in the formula; null takes the model's `dim`."""


class CosineSchedule(ConfigSection):
    """Linear warm-up to `optim.lr`, then half a cosine down (Loshchilov and Hutter 2017, arXiv:1608.03983)."""

    name: Literal["cosine"] = "cosine"
    """Linear warm-up to the peak, then half a cosine down."""
    warmup: NonNegativeInt | None = None
    """Steps of linear warm-up; null means 100, or a tenth of a run that ends before 1000 steps."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The final learning rate as a fraction of the peak."""
    steps: PositiveInt | None = None
    """The step of the final learning rate; null means the end of the run, by the limit that is nearest."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.steps is not None and self.warmup is not None and self.warmup >= self.steps:
            message = f"{self.warmup} steps of warm-up leave nothing of schedule.steps {self.steps}"
            yield SettingConflict(("warmup",), message, ("schedule.steps",))


class ConstantSchedule(ConfigSection):
    """Linear warm-up to `optim.lr`, then a constant rate."""

    name: Literal["constant"] = "constant"
    """Linear warm-up to the peak, then a constant rate."""
    warmup: NonNegativeInt | None = None
    """Steps of linear warm-up; null means 100, or a tenth of a run that ends before 1000 steps."""


class WSDSchedule(ConfigSection):
    """Warm-up, stable, decay, a trapezoid (Hu et al. 2024, MiniCPM, arXiv:2404.06395; Hägele et al. 2024,
    arXiv:2405.18392): linear warm-up to `optim.lr`, then a constant rate, which falls in the last part of the run."""

    name: Literal["wsd"] = "wsd"
    """Linear warm-up to the peak, a constant rate, and a decay at the end."""
    warmup: NonNegativeInt | None = None
    """Steps of linear warm-up; null means 100, or a tenth of a run that ends before 1000 steps."""
    decay_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The share of the run in which the rate decays, by the limit that is nearest; with 1 it decays all the time after
    the warm-up, linearly to zero by default (Bergsma et al. 2025, arXiv:2502.15938)."""
    shape: Literal["linear", "1-sqrt", "exponential"] = "linear"
    """The decay: `linear`, `1-sqrt` (1 minus the root of the share of the decay that is done), or `exponential`."""
    final_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What the rate decays to, as a fraction of the peak; the last step is one before it, and has a rate above 0."""
    decay_from: Literal["now"] | None = None
    """`now` lets the rate decay from the checkpoint of `branch_from` to the end of the run; null as `decay_share`
    says."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.shape == "exponential" and not self.final_ratio:
            message = "must be above 0, such as 0.01, with schedule.shape exponential, which never reaches 0"
            yield SettingConflict(("final_ratio",), message, ("schedule.shape",))


class LossConfig(ConfigSection):
    """The training loss, besides a model's own auxiliary losses."""

    label_smoothing: Fraction = 0.0
    """Label smoothing: the probability spread over the whole vocabulary (Vaswani et al. 2017, section 5.4: 0.1)."""
    gate_penalty: PositiveFloat | None = None
    """Trains gates on attention heads with this penalty times the mean number of open gates in a layer (Voita et al.
    2019, section 6.1); the final model has the gates in its output projections. null means no gates."""
    gated_part: PathText | None = None
    """The part of the model with gates, such as encoder; null means all of it."""
    gate_lr_scale: PositiveFloat = 100.0
    """The learning rate of the gates, as a multiple of that of the weights."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.gated_part is not None and self.gate_penalty is None:
            yield SettingConflict(("gated_part",), "needs loss.gate_penalty: without it there are no gates", ())


class TransferConfig(ConfigSection):
    """Attention transfer: kernels that replace those of trained weights learn to imitate them before the training."""

    steps: PositiveInt | None = None
    """Steps in which the tensors of new kernels alone learn, on the outputs of the attentions that they replace (Zhang
    et al. 2024, LoLCATs, arXiv:2410.10254, section 3.1); null means none."""
    match: Literal["outputs", "weights"] = "outputs"
    """What a new attention imitates: the output (squared error, relative to the mean square), or the attention weights
    (cross-entropy; Zhang et al. 2024, Hedgehog, arXiv:2402.04347, section 4.2)."""
    lr: PositiveFloat = 0.01
    """The learning rate of Adam at the first of these steps; it falls linearly to 0."""


class LoraConfig(ConfigSection):
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685): trained in place of the weights, and merged at the end."""

    rank: PositiveInt | None = None
    """The rank of the matrices that are added to those of `lora.parts`, such as 8; null means no adapters. All weights
    but the adapters' and the head's are frozen."""
    alpha: PositiveFloat = 16.0
    """What is added is multiplied by alpha / rank."""
    input_dropout: Fraction = 0.0
    """Dropout of the inputs of the adapters."""
    parts: Annotated[tuple[PathText, ...], TupleOrText, Field(min_length=1)] = ("q_proj", "kv_proj")
    """The linear layers with adapters, by the last part of their names, or by patterns of whole names, such as
    `body.1.*`. A layer that projects keys and values has an adapter for each."""

    def conflicts(self) -> Iterator[SettingConflict]:
        for name in ("alpha", "input_dropout", "parts"):
            if self.rank is None and getattr(self, name) != type(self).model_fields[name].default:
                yield SettingConflict((name,), "needs lora.rank: without it there are no adapters", ("lora.rank",))


class BatchConfig(ConfigSection):
    """The size of a training step, and how early its batches are read."""

    tokens: PositiveInt = 8192
    """Tokens of one forward and backward pass, padding counted, all processes together."""
    accumulate: PositiveInt = 1
    """Gradient accumulation: passes whose gradients are summed for one step."""
    start: PositiveInt | None = None
    """Batch-size warm-up: the passes of the first steps, which grow evenly to `batch.accumulate`; the order of the data
    is the same. null means as many as `batch.accumulate` from the first step on."""
    warmup_steps: PositiveInt | None = None
    """The steps after which a step has `batch.accumulate` passes, where `batch.start` has fewer."""
    warmup_tokens: PositiveInt | None = None
    """The same in target tokens trained on."""
    ahead: Annotated[
        Annotated[NonNegativeInt, Field(le=MAX_AHEAD)] | Literal["auto"],
        accepted_forms(f"a number of batches up to {MAX_AHEAD}, or auto"),
    ] = "auto"
    """How many batches a thread reads, and copies to the device, before they are trained on; 0 means none. `auto` means
    2 on a GPU and 0 on a CPU, whose cores reading and training would share. The order of the batches is the same."""

    def conflicts(self) -> Iterator[SettingConflict]:
        lengths = [name for name in ("warmup_steps", "warmup_tokens") if getattr(self, name) is not None]
        if self.start is None:
            for name in lengths:
                yield SettingConflict((name,), "needs batch.start, the passes of the first steps", ("batch.start",))
            return
        if self.start >= self.accumulate:
            message = f"{self.start} passes cannot grow to batch.accumulate {self.accumulate}; set fewer, or null"
            yield SettingConflict(("start",), message, ("batch.accumulate",))
        if len(lengths) != 1:
            message = "needs batch.warmup_steps or batch.warmup_tokens, one of the two: when it ends"
            yield SettingConflict(("start",), message, ("batch.warmup_steps", "batch.warmup_tokens"))


class LimitsConfig(ConfigSection):
    """When a run ends: at the first limit reached."""

    steps: PositiveInt | None = None
    """Optimizer steps."""
    epochs: PositiveFloat | None = None
    """Passes over the training data."""
    tokens: PositiveInt | None = None
    """Target tokens trained on."""
    minutes: PositiveFloat | None = None
    """Minutes of training, summed over interruptions."""
    cpu_minutes: PositiveFloat | None = None
    """CPU minutes of training, summed over all threads and processes: other work of the machine is not counted."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if all(limit is None for _, limit in self):
            message = "a run needs an end: set at least one of steps, epochs, tokens, minutes and cpu_minutes"
            yield SettingConflict((), message)


class EvaluateConfig(ConfigSection):
    """When and how the validation data is scored."""

    every: PositiveInt | None = 200
    """Steps between evaluations; null means only at the end."""
    metric: str = "loss"
    """The metric of the task that ranks checkpoints and decides early stopping: `loss`, or usually also `accuracy`."""
    patience: PositiveInt | None = None
    """Early stopping: end after so many evaluations in a row without a better one; null means never."""
    target: float | None = None
    """End as soon as a validation reaches this value of `metric`; null means never."""
    batches: PositiveInt | None = None
    """Number of validation batches to score, always the same ones; null means all."""

    def conflicts(self) -> Iterator[SettingConflict]:
        for name in ("patience", "target"):
            if getattr(self, name) is not None and self.every is None:
                message = "needs evaluate.every: nothing is scored before the end"
                yield SettingConflict((name,), message, ("evaluate.every",))


class SaveConfig(ConfigSection):
    """When checkpoints are written and which are kept."""

    every: PositiveInt = 200
    """Steps between checkpoints; one more is written at the end."""
    keep_last: PositiveInt = 2
    """How many of the latest checkpoints are kept."""
    keep_best: NonNegativeInt = 1
    """How many of the best checkpoints, by `evaluate.metric`, are kept in addition."""
    average_last: NonNegativeInt = 0
    """Average so many of the latest checkpoints into the final model; 0 means take the best, or else the last."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.average_last > self.keep_last:
            problem = f"{self.average_last} checkpoints cannot be averaged where save.keep_last is {self.keep_last}"
            yield SettingConflict(("average_last",), f"{problem}; set save.keep_last too", ("save.keep_last",))


class EmaConfig(ConfigSection):
    """The exponential moving average of the weights, a float32 copy that follows them."""

    beta: Fraction | None = None
    """After each step, average = beta average + (1 - beta) weight; such as 0.999, which averages the last 1000 steps.
    null means no average."""
    warmup: bool = True
    """Use the least of beta and (1 + step) / (10 + step), so that the first weights are soon forgotten."""
    evaluate: bool = True
    """Validations score the averaged weights, and the final model has them. false scores the weights themselves, and
    takes the averages of the last step for the final model if they score better."""

    def conflicts(self) -> Iterator[SettingConflict]:
        for name in ("warmup", "evaluate"):
            if self.beta is None and not getattr(self, name):
                yield SettingConflict((name,), "needs ema.beta: without it there is no average", ("ema.beta",))


class MupConfig(ConfigSection):
    """Learning rates that transfer over widths (Yang et al. 2021, arXiv:2203.03466, table 8): for comparisons of models
    of several widths at one rate."""

    base_width: PositiveInt | None = None
    """The `model.dim` at which the rate is meant. Weights of linear layers have the rate times base_width / dim, heads
    as many times fewer in the base model as it is narrower. null means one rate for all weights at every width."""
    form: Literal["full", "simple"] = "full"
    """`full` also takes the first scales from the base model and divides the logits; `simple` changes rates alone."""

    def conflicts(self) -> Iterator[SettingConflict]:
        if self.base_width is None and self.form != "full":
            yield SettingConflict(("form",), "needs mup.base_width", ("mup.base_width",))


class LogConfig(ConfigSection):
    """What is logged during training."""

    every: PositiveInt = 10
    """Steps between two rows of the metrics."""


OptimConfig = (
    AdamWConfig | AdamConfig | AdagradConfig | AdadeltaConfig | MuonConfig | SGDConfig | LionConfig | AdafactorConfig
)
ScheduleConfig = NoamSchedule | CosineSchedule | ConstantSchedule | WSDSchedule
