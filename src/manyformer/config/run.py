"""RunConfig: the validated configuration of a training run, without torch."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue

from manyformer.config.data_sections import DataSection, EnvironmentData, SectionByKind, TextData
from manyformer.config.section import (
    ConfigSection,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    SettingConflict,
    TupleOrText,
    accepted_forms,
)
from manyformer.config.training_sections import (
    DEFAULT_LR,
    DEFAULT_WARMUP,
    MATCHED_LR,
    AdadeltaConfig,
    AdafactorConfig,
    AdagradConfig,
    AdamWConfig,
    BatchConfig,
    CosineSchedule,
    EmaConfig,
    EvaluateConfig,
    LimitsConfig,
    LogConfig,
    LoraConfig,
    LossConfig,
    MuonConfig,
    MupConfig,
    NoamSchedule,
    OptimConfig,
    SaveConfig,
    ScheduleConfig,
    TransferConfig,
    WSDSchedule,
)

LayerNumbers = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
MAX_DEVICES = 1024
"""The most processes that one command starts."""

# The sections that are unions, with the setting that selects the member and its default.
UNION_TAGS = {"data": ("kind", "text"), "optim": ("name", "adamw"), "schedule": ("name", "cosine")}


def _default_member(section: str) -> BeforeValidator:
    tag, default = UNION_TAGS[section]
    return BeforeValidator(lambda settings: {tag: default, **settings} if isinstance(settings, dict) else settings)


class RunConfig(ConfigSection):
    """The complete configuration of a training run."""

    recipe: PathText
    """The architecture: a name from `manyformer list`."""
    imports: Annotated[tuple[PathText, ...], TupleOrText, Field(alias="import")] = ()
    """Modules or .py files that define recipes, tasks or kinds of data, in this folder, the run file's or installed."""
    model: dict[str, JsonValue] = Field(default_factory=dict)
    """Keywords of the recipe (see `manyformer show RECIPE`), except those that the data decides: vocab, classes."""
    init_from: PathText | None = None
    """A run or a saved model whose weights initialize the model; in a comparison also one of its cases, which is then
    trained first; null means random initialization. The recipe, its keywords and the tokenizer are those of the saved
    model unless the run sets them. Keywords that decide no weights, such as windows, may differ, and there may be more
    learned positions."""
    data: Annotated[DataSection, SectionByKind(), _default_member("data")] = TextData()
    """The training and validation data."""
    optim: Annotated[OptimConfig, Field(discriminator="name"), _default_member("optim")] = AdamWConfig()
    """The optimizer."""
    schedule: Annotated[ScheduleConfig, Field(discriminator="name"), _default_member("schedule")] = CosineSchedule()
    """The learning rate over time."""
    loss: LossConfig = LossConfig()
    """The training loss."""
    frozen: Annotated[tuple[PathText, ...], TupleOrText] = ()
    """Parts of the model whose weights stay as in `init_from`, such as decoder, by the names of their modules."""
    frozen_layers: Annotated[PositiveInt | Literal["all"] | None, accepted_forms("a number of layers, all or null")] = (
        None
    )
    """How many of the lowest layers stay as in `init_from`, with the embedding; `all` trains the head alone."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters that are trained instead of the weights, such as `{rank: 8, parts: [q_proj, kv_proj]}`."""
    transfer: TransferConfig = TransferConfig()
    """Attention transfer from the weights of `init_from`, before the first step."""
    branch_from: PathText | None = None
    """A run, or one of its checkpoints (RUN/checkpoints/step-00000800), from which this run goes on in a folder of its
    own, with the weights, the optimizer, the counters, the place in the data and the random numbers of that moment;
    other limits, rates and schedules are allowed. null means a run of its own."""
    batch: BatchConfig = BatchConfig()
    """The size of a training step."""
    limits: LimitsConfig = LimitsConfig(steps=2000)
    """When the run ends: at the first limit reached; 2000 steps by default."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """When the validation data is scored."""
    save: SaveConfig = SaveConfig()
    """When checkpoints are written and which are kept."""
    mup: MupConfig = MupConfig()
    """Learning rates that transfer over widths."""
    ema: EmaConfig = EmaConfig()
    """A moving average of the weights."""
    log: LogConfig = LogConfig()
    """What is logged during training."""
    trackers: Annotated[tuple[Literal["tensorboard", "wandb", "mlflow"], ...], TupleOrText] = ()
    """Trackers to write to besides the metrics files: `tensorboard`, `wandb` (Weights & Biases, offline unless
    WANDB_MODE is online) or `mlflow` (in MLFLOW_TRACKING_URI, else in a file of the run)."""
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of the forward pass: auto means bfloat16 on a CUDA device that has it, else float32. Weights stay
    float32. With `float16` the loss is scaled, so that small gradients do not become 0."""
    tf32: Literal["auto", "on", "off"] = "auto"
    """Whether products of float32 may be rounded to TF32 on a CUDA device: auto means in runs in half precision alone,
    where autocast leaves some operations in float32."""
    deterministic: bool = False
    """Use only operations that repeat their results to the last bit (`torch.use_deterministic_algorithms`); one that
    cannot ends the run in a sentence."""
    compile: Literal["auto", "on", "off", "layers"] = "auto"
    """Compile the model with torch.compile. `layers` compiles each layer by itself: equal layers are compiled once, so
    that deep models begin sooner; `on` compiles the model as a whole. auto means on CUDA devices alone: `layers` where
    a model has layers that are called one by one, else `on`."""
    activation_checkpointing: Annotated[
        bool | PositiveInt | LayerNumbers, accepted_forms("true, false, K for every K-th layer, or a list of layers")
    ] = False
    """Compute activations again in the backward pass instead of keeping them: less memory, more time. True means those
    of every layer, a number K those of every K-th one, a list those of these layers, counted from 1 through the model.
    """
    seed: NonNegativeInt = 0
    """Decides initial weights, dropout and the order of the data."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train: auto means a GPU if there is one, `cuda` before `mps`; several processes need `cuda` or `cpu`."""
    devices: Annotated[PositiveInt, Field(le=MAX_DEVICES)] = 1
    """How many processes train together, one on each GPU (or on CPUs)."""
    process_timeout: PositiveFloat = 10.0
    """Minutes that processes wait for one that does not answer before the run ends; preparing data may take longer."""
    strategy: Literal["none", "ddp", "fsdp", "context"] = "none"
    """How processes share the work: `ddp` replicates the model, `fsdp` shards it, each with a part of the rows;
    `context` divides the tokens of each row of a text. By default ddp if devices > 1."""
    out: PathText | None = None
    """The run's folder; null means runs/NAME, after the run file or the recipe."""

    @property
    def warmup(self) -> int:
        """Steps of linear warm-up; chosen by the length of the run if the schedule does not set them."""
        if self.schedule.warmup is not None:
            return self.schedule.warmup
        default = DEFAULT_WARMUP[self.schedule.name]
        if self.limits.steps is None:
            return default
        # a short run would end within the usual warm-up
        return min(default, max(1, self.limits.steps // 10))

    @classmethod
    def fill(cls, settings: dict[str, Any]) -> dict[str, Any]:
        # several processes need a strategy, and replicas are the one that every model allows
        devices = settings.get("devices")
        if "strategy" not in settings and isinstance(devices, int | float) and devices > 1:
            settings["strategy"] = "ddp"
        if not _is_noam(settings.get("schedule")):
            settings["optim"] = _with_default_lr(settings.get("optim", {}))
        return settings

    def conflicts(self) -> Iterator[SettingConflict]:
        if isinstance(self.schedule, NoamSchedule) and self.optim.lr is not None:
            message = "noam sets the learning rate itself; leave optim.lr out or null, and change schedule.scale"
            yield SettingConflict(("optim", "lr"), message, ("schedule.name",))
        if isinstance(self.schedule, NoamSchedule) and isinstance(self.optim, MuonConfig):
            message = "noam sets one learning rate, and Muon has two, for matrices and for all else; choose another"
            yield SettingConflict(("schedule", "name"), message, ("optim.name",))
        if not isinstance(self.optim, MuonConfig) and any(group.optimizer for group in self.optim.groups):
            message = "an optimizer of a group is one of Muon's two: it needs optim.name=muon"
            yield SettingConflict(("optim", "groups"), message, ("optim.name",))
        without_decay = isinstance(self.optim, AdagradConfig | AdadeltaConfig)
        if without_decay and any(group.weight_decay is not None for group in self.optim.groups):
            message = f"{self.optim.name} has no weight decay"
            yield SettingConflict(("optim", "groups"), message, ("optim.name",))
        if isinstance(self.optim, AdafactorConfig) and self.strategy == "fsdp":
            message = "must not be fsdp with adafactor, which needs whole rows and columns"
            yield SettingConflict(("strategy",), message, ("optim.name",))
        steps = self.limits.steps
        warmup = self.schedule.warmup
        if steps is not None and warmup is not None and warmup >= steps:
            reason = "the rate would never reach its peak"
            message = f"{warmup} steps of warm-up do not fit in limits.steps {steps}; {reason}"
            yield SettingConflict(("schedule", "warmup"), message, ("limits.steps",))
        if isinstance(self.schedule, WSDSchedule) and self.schedule.decay_from and self.branch_from is None:
            message = "needs branch_from: the rate decays from the checkpoint of another run"
            yield SettingConflict(("schedule", "decay_from"), message, ("branch_from",))
        if self.mup.base_width is not None:
            yield from self._mup_conflicts()
        if self.ema.beta is not None and self.save.average_last:
            message = "must be 0 with ema.beta: the final model has one average or the other"
            yield SettingConflict(("save", "average_last"), message, ("ema.beta",))
        random = "needs init_from: random weights would stay random"
        for name in ("frozen", "frozen_layers"):
            if getattr(self, name) and self.init_from is None:
                yield SettingConflict((name,), random, ("init_from",))
        if self.lora.rank is not None:
            if self.init_from is None:
                yield SettingConflict(("lora", "rank"), random, ("init_from",))
            if self.loss.gate_penalty is not None:
                yield SettingConflict(("lora", "rank"), "must be null with loss.gate_penalty", ("loss.gate_penalty",))
            if self.strategy == "fsdp":
                yield SettingConflict(("strategy",), "must not be fsdp with lora.rank", ("lora.rank",))
        if self.transfer.steps is not None and self.init_from is None:
            message = "needs init_from: attention is transferred from trained weights"
            yield SettingConflict(("transfer", "steps"), message, ("init_from",))
        if self.transfer.steps is not None and self.devices > 1:
            message = "needs devices=1: `manyformer convert --transfer` makes the model that several devices train"
            yield SettingConflict(("transfer", "steps"), message, ("devices",))
        if self.loss.gate_penalty is not None and self.save.keep_best:
            message = "must be 0 with loss.gate_penalty: the best loss is that of gates that are still open"
            yield SettingConflict(("save", "keep_best"), message, ("loss.gate_penalty",))
        if self.loss.gate_penalty is not None and self.strategy == "fsdp":
            yield SettingConflict(("strategy",), "must not be fsdp with loss.gate_penalty", ("loss.gate_penalty",))
        if self.devices > 1 and self.strategy == "none":
            message = f"{self.devices} devices need strategy ddp or fsdp to share the work, not none"
            yield SettingConflict(("strategy",), message, ("devices",))
        if isinstance(self.data, EnvironmentData) and self.batch.ahead not in ("auto", 0):
            message = "must be auto or 0: what a policy does depends on its weights of the moment"
            yield SettingConflict(("batch", "ahead"), message, ("data.kind",))
        if self.strategy == "context":
            yield from self._context_conflicts()

    def _mup_conflicts(self) -> Iterator[SettingConflict]:
        """What the transfer of rates over widths does not allow."""
        if self.optim.name not in ("adamw", "adam"):
            message = f"its rules are those of adamw and adam; {self.optim.name} has others"
            yield SettingConflict(("mup", "base_width"), message, ("optim.name",))
        if self.schedule.name == "noam":
            message = "noam's rate follows the width by a rule of its own; set schedule.name=cosine"
            yield SettingConflict(("mup", "base_width"), message, ("schedule.name",))
        if self.init_from is not None:
            message = "is about first weights and their rates, and init_from brings trained ones; leave one of them out"
            yield SettingConflict(("mup", "base_width"), message, ("init_from",))

    def _context_conflicts(self) -> Iterator[SettingConflict]:
        """What strategy=context does not allow."""
        data = self.data
        if not isinstance(data, TextData):
            yield SettingConflict(
                ("strategy",), "context divides rows of text: it needs data.kind text", ("data.kind",)
            )
        elif data.packing == "contiguous":
            message = "context divides rows that stand alone: it needs data.packing documents, concat or random"
            yield SettingConflict(("strategy",), message, ("data.packing",))
        elif data.length % self.devices:
            message = f"{data.length} tokens must be a multiple of devices ({self.devices}), which divide each row"
            yield SettingConflict(("data", "length"), message, ("devices",))


def _is_noam(schedule: Any) -> bool:
    return isinstance(schedule, NoamSchedule) or (isinstance(schedule, dict) and schedule.get("name") == "noam")


def _with_default_lr(optim: Any) -> Any:
    if isinstance(optim, OptimConfig) and optim.lr is None:
        return optim.model_copy(update={"lr": _default_lr(optim.model_dump())})
    if isinstance(optim, dict) and optim.get("lr") is None:
        rate = _default_lr(optim)
        # a name that no optimizer has is refused with the section
        if rate is not None:
            return {**optim, "lr": rate}
    return optim


def _default_lr(optim: dict[str, Any]) -> float | None:
    name = optim.get("name", AdamWConfig().name)
    if name == "muon" and optim.get("scale") == "match_rms_adamw":
        return MATCHED_LR
    if isinstance(name, str):
        return DEFAULT_LR.get(name)
    return None
