"""The whole of a training run in one frozen, validated record, without torch."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from manyformer.config.data_sections import DataConfig, TextData
from manyformer.config.section import ConfigSection, NonNegativeInt, PathText, PositiveInt, SettingConflict
from manyformer.config.training_sections import (
    WARMUP,
    AdamConfig,
    AdamWConfig,
    BatchConfig,
    CosineSchedule,
    EvaluateConfig,
    LimitsConfig,
    LogConfig,
    LossConfig,
    NoamSchedule,
    OptimConfig,
    SaveConfig,
    ScheduleConfig,
)

LEARNING_RATE = 1e-3
# The sections that are unions, the setting that tells their members apart, and the member meant when it is left out.
TAGS = {"data": ("kind", "text"), "optim": ("name", "adamw"), "schedule": ("name", "cosine")}


def _usual_member(section: str) -> BeforeValidator:
    tag, usual = TAGS[section]
    return BeforeValidator(lambda given: {tag: usual, **given} if isinstance(given, dict) else given)


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


class RunConfig(ConfigSection):
    """Everything that decides what a training run does."""

    recipe: PathText
    """The architecture: a name that `manyformer list` shows."""
    model: dict[str, JsonValue] = Field(default_factory=dict)
    """Keywords of the recipe (`manyformer show RECIPE` lists them), without what the data decides: vocab, classes."""
    start: PathText | None = None
    """A run, or a saved model, whose weights it begins with, made with the same tokenizer; in a comparison also one of
    its cases, to be trained before; null draws them at random.
    Keywords may differ that decide no weights, such as windows, and learned positions may be more."""
    data: Annotated[DataConfig, Field(discriminator="kind"), _usual_member("data")] = TextData()
    """What it learns from."""
    optim: Annotated[OptimConfig, Field(discriminator="name"), _usual_member("optim")] = AdamWConfig()
    """The optimiser."""
    schedule: Annotated[ScheduleConfig, Field(discriminator="name"), _usual_member("schedule")] = CosineSchedule()
    """The learning rate over time."""
    loss: LossConfig = LossConfig()
    """What is minimised."""
    batch: BatchConfig = BatchConfig()
    """How much one step sees."""
    limits: LimitsConfig = LimitsConfig(steps=2000)
    """When it ends: the first limit reached; 2000 steps when none is given."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """When the validation data is scored."""
    save: SaveConfig = SaveConfig()
    """When checkpoints are written and which are kept."""
    log: LogConfig = LogConfig()
    """What is written while training."""
    track: Annotated[tuple[Literal["tensorboard"], ...], BeforeValidator(_listed)] = ()
    """Trackers to write to besides the metrics files: `tensorboard`."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the forward pass: auto means bfloat16 on a GPU that has it, else float32. Weights stay float32."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the model with torch.compile: auto means on a GPU alone."""
    remat: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time."""
    seed: NonNegativeInt = 0
    """Decides initial weights, dropout and the order of the data."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train: auto means a GPU where there is one."""
    devices: PositiveInt = 1
    """How many processes train together, one on each GPU (or on CPUs)."""
    strategy: Literal["none", "ddp", "fsdp"] = "none"
    """How processes share the work: `ddp` copies the model, `fsdp` shards it; ddp when left out and devices > 1."""
    out: PathText | None = None
    """The run's folder; null means runs/NAME, after the run file or the recipe."""

    @property
    def warmup(self) -> int:
        """Steps of the linear rise, chosen by the length of the run where the schedule leaves it open."""
        if self.schedule.warmup is not None:
            return self.schedule.warmup
        usual = WARMUP[self.schedule.name]
        return usual if self.limits.steps is None else min(usual, max(1, self.limits.steps // 10))

    @classmethod
    def fill(cls, given: dict[str, Any]) -> dict[str, Any]:
        devices = given.get("devices")
        if "strategy" not in given and isinstance(devices, int | float) and devices > 1:
            given["strategy"] = "ddp"
        if not _is_noam(given.get("schedule")):
            given["optim"] = _with_rate(given.get("optim", {}))
        return given

    def conflicts(self) -> list[SettingConflict]:
        found = []
        if isinstance(self.schedule, NoamSchedule) and self.optim.lr is not None:
            what = "noam sets the learning rate itself; leave optim.lr out or null, and change schedule.scale"
            found.append(SettingConflict(("optim", "lr"), what, ("schedule.name",)))
        steps, warmup = self.limits.steps, self.schedule.warmup
        if steps is not None and warmup is not None and warmup >= steps:
            what = f"{warmup} steps of warm-up do not fit in limits.steps {steps}; the rate would never reach its peak"
            found.append(SettingConflict(("schedule", "warmup"), what, ("limits.steps",)))
        if self.devices > 1 and self.strategy == "none":
            what = f"{self.devices} devices need strategy ddp or fsdp to share the work, not none"
            found.append(SettingConflict(("strategy",), what, ("devices",)))
        return found


def _is_noam(schedule: Any) -> bool:
    return isinstance(schedule, NoamSchedule) or (isinstance(schedule, dict) and schedule.get("name") == "noam")


def _with_rate(optim: Any) -> Any:
    if isinstance(optim, AdamWConfig | AdamConfig) and optim.lr is None:
        return optim.model_copy(update={"lr": LEARNING_RATE})
    if isinstance(optim, dict) and optim.get("lr") is None:
        return {**optim, "lr": LEARNING_RATE}
    return optim
