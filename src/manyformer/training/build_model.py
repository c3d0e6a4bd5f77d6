"""Open the data of a run, and build its model, the device, the parallel strategy and the training engine.

`adapt_model` restricts the training to a part of the weights: frozen parts, frozen layers, low-rank adapters."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.type_aliases import LogFn
from manyformer.config import RunConfig
from manyformer.conversion.surgery.lora import attach_lora, is_head
from manyformer.data import open_data
from manyformer.data.batching.epochs import TrainingFeed
from manyformer.data.pipeline.kind import kind_of
from manyformer.data.pipeline.opened import OpenedData
from manyformer.models import Model
from manyformer.models.tasks.masked_language_modelling import HEAD
from manyformer.nn.runtime.devices import KINDS, available_devices, check_model_fits, device_kind
from manyformer.nn.runtime.torch_internals import compile_backward_as_eager
from manyformer.recipes import build, get_recipe
from manyformer.recipes.parts.registry import build_on_meta
from manyformer.training.checkpoints import CheckpointStore
from manyformer.training.engine import TrainingEngine
from manyformer.training.layers import checkpoint_activations, compile_layers, default_compilation, layer_depths
from manyformer.training.process_group import DDPStrategy, ParallelStrategy, ProcessGroup
from manyformer.training.width_transfer import rate_scales, scale_first_weights

HALF_PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
"""The dtypes of autocast by the precision of a run."""

_KEYWORD_REMEDIES = {"source_vocab": "; set data.shared=true for one vocabulary on both sides"}

_BLOCK_REMEDY = "give the blocks of images as data.block=[ROWS, COLUMNS] instead"
_CONFLICT_REMEDIES = {"block_height": _BLOCK_REMEDY, "block_width": _BLOCK_REMEDY, "window": "set data.length instead"}
"""Remedies for keywords that only the data may decide, where leaving the keyword out is not enough."""


def open_run_data(run: RunConfig, out: Path, log: LogFn) -> OpenedData:
    """Open the training and validation data of a run."""
    # refuses batches that only a program can give
    kind = kind_of(run.data)
    task = get_recipe(run.recipe).card.task.variant(kind.name)
    return open_data(
        run.data,
        task.data_forms[kind.name],
        batch_tokens=run.batch.tokens,
        cache=out / "data",
        seed=run.seed,
        belongs_to_model=bool(CheckpointStore(out / "checkpoints").steps()),
        log=log,
    )


def build_model(run: RunConfig, data: OpenedData, device: torch.device) -> Model:
    """Build the run's model with randomly initialized weights; the data decides some of its keywords.

    Raises UserError if the run sets one of those to another value, if the data is longer than the model allows, and if
    the model cannot be trained in the memory of the device.
    """
    keywords = model_keywords(run, data)
    build_run = partial(build, run.recipe, **keywords)
    check_model_fits(build_run, run.recipe, keywords, copies=training_copies(run), device=device)
    model = build_run()
    scale_first_weights(run, model)
    # of the built model, which may have a length of its own
    data.check_length(model.max_length)
    if getattr(run.data, "packing", None) == "contiguous" and not model.carries_state:
        # a model without its memory, on the same rows, is what a memory is compared with
        chosen_keywords = {name: value for name, value in keywords.items() if value is not None}
        with torch.random.fork_rng(devices=[]):
            comparable = build_on_meta(run.recipe, chosen_keywords)
        if not comparable.carries_state:
            raise UserError(
                f"data.packing=contiguous continues rows for a model with a memory, and {run.recipe} has none; set "
                "data.packing=documents, or concat for one long text"
            )
    return model


OPTIMIZER_COPIES = {"sgd": 1, "lion": 1, "adagrad": 1, "adafactor": 0}
"""The numbers that these optimizers keep for each weight; the others keep two, Muon for all but hidden matrices."""


def training_copies(run: RunConfig) -> int:
    """How many numbers a process holds for each weight."""
    # FSDP divides them among the processes
    if run.strategy == "fsdp":
        return 1
    # weights, their gradients, what the optimizer keeps, and a moving average
    return 2 + OPTIMIZER_COPIES.get(run.optim.name, 2) + (run.ema.beta is not None)


def takes_length_of_data(run: RunConfig) -> bool:
    return "max_length" in get_recipe(run.recipe).signature.parameters and run.model.get("max_length") is None


def model_keywords(run: RunConfig, data: OpenedData) -> dict[str, Any]:
    """The keywords of the run's model, of which the data decides some.

    Raises UserError if the run sets one of those to another value."""
    recipe = get_recipe(run.recipe)
    parameters = recipe.signature.parameters
    data_keywords = {**data.required_keywords} | {
        name: value for name, value in data.offered_keywords.items() if name in parameters
    }
    if HEAD in parameters:
        data_keywords[HEAD] = recipe.card.task.variant(run.data.kind).name
    for name, value in data_keywords.items():
        # a recipe that lacks what the data decides cannot learn from it
        if name not in parameters:
            remedy = _KEYWORD_REMEDIES.get(name, "")
            raise UserError(f"{run.recipe} has no keyword {name}, which this data needs ({_format(value)}){remedy}")
        if name in ("vocab", "source_vocab") and _exceeds(run.model.get(name), value):
            # the rows of an embedding that its tokenizer does not use, as many trained models have
            data_keywords[name] = run.model[name]
        elif name in run.model and run.model[name] != value:
            remedy = _CONFLICT_REMEDIES.get(name, "leave it out")
            raise UserError(f"model.{name} is {run.model[name]}, but the data makes it {_format(value)}; {remedy}")
    keywords: dict[str, Any] = {**run.model, **data_keywords}
    if takes_length_of_data(run):
        keywords["max_length"] = max(limit.length for limit in data.length_limits)
    return keywords


def _exceeds(size: Any, least: int) -> bool:
    return type(size) is int and size > least


def _format(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}"
    return str(value)


def choose_device(requested: str, process_group: ProcessGroup) -> torch.device:
    """The device of a run; for several processes, auto means one on which they can share the work.

    Raises UserError if the requested GPU does not exist, or serves one process alone."""
    usable = [KINDS[name] for name in available_devices()]
    is_shared = process_group.size > 1
    if requested == "auto":
        # the first is the fastest
        kind = next(kind for kind in usable if kind.collectives is not None or not is_shared)
    else:
        kind = KINDS[requested]
    if kind not in usable:
        raise UserError(f"device is {kind.type}, but torch finds no such device here; set device=cpu or auto")
    if is_shared and kind.collectives is None:
        problem = f"device is {kind.type}, on which processes cannot send each other tensors"
        raise UserError(f"{problem}; set devices=1, or device=cpu")
    if kind.is_host or kind.collectives is None:
        return torch.device(kind.type)
    if process_group.local_rank >= kind.how_many():
        number = process_group.local_rank + 1
        count = kind.how_many()
        raise UserError(f"devices needs GPU number {number}, and there are {count}; set devices={count}")
    return torch.device(kind.type, process_group.local_rank)


def choose_autocast(precision: str, device: torch.device, model: Model) -> torch.dtype | None:
    """The autocast dtype of forward passes; None for float32. Raises UserError for a model that must have float32."""
    # `auto` means float32 for such a model
    if not model.allows_autocast:
        if precision in HALF_PRECISIONS:
            reason = f"{model.spec.recipe} acts and learns in float32"
            raise UserError(f"precision is {precision}, but {reason}; leave it out")
        return None
    kind = device_kind(device)
    if precision == "auto":
        if kind.half_by_default and kind.has_bfloat16():
            return torch.bfloat16
        return None
    usable = {"bfloat16": kind.emulates_bfloat16 or kind.has_bfloat16(), "float16": kind.has_float16}
    if not usable.get(precision, True):
        raise UserError(f"precision is {precision}, which {kind.describe(device)} does not have; set precision=float32")
    return HALF_PRECISIONS.get(precision)


def make_engine(
    run: RunConfig, model: Model, feed: TrainingFeed, device: torch.device, strategy: ParallelStrategy
) -> TrainingEngine:
    """The engine that trains the model of a run on batches of `feed`, for which the model acts where it must."""
    autocast = prepare_model(run, model, device)
    # after the model is on its device, where a policy acts
    feed.attach(model)
    return TrainingEngine(
        model,
        run.optim,
        strategy,
        label_smoothing=run.loss.label_smoothing,
        autocast=autocast,
        rows_continue=feed.rows_continue,
        ema=run.ema,
        rate_scales=rate_scales(run, model),
    )


def prepare_model(run: RunConfig, model: Model, device: torch.device) -> torch.dtype | None:
    """Move the model to its device, recompute activations and compile as the run says; returns its autocast dtype."""
    autocast = choose_autocast(run.precision, device, model)
    kind = device_kind(device)
    choose_float32_products(run.tf32, device, is_half=autocast is not None)
    if run.activation_checkpointing:
        checkpoint_activations(model, run.activation_checkpointing)
    model.to(device)
    # on a CPU, compiling takes half a minute and saves a hundredth of each step
    choice = run.compile
    if choice == "auto":
        choice = default_compilation(model) if kind.compiles_by_default else "off"
    if choice != "off":
        compile_backward_as_eager()
    if choice == "layers":
        compile_layers(model)
    elif choice == "on":
        model.compile()
    return autocast


def choose_float32_products(tf32: str, device: torch.device, *, is_half: bool) -> None:
    """Let products of float32 be rounded to TF32 where a run says so, for the whole process.

    Raises UserError for a device without TF32."""
    kind = device_kind(device)
    if tf32 == "on" and not kind.multiplies_tf32:
        raise UserError(f"tf32 is on, but {kind.describe(device)} ({kind.type}) has no TF32; leave it out")
    # operators that autocast leaves in float32 may use the units for half precision too
    if tf32 == "on" or (tf32 == "auto" and is_half and not kind.is_host):
        torch.set_float32_matmul_precision("high")
    elif tf32 == "off":
        torch.set_float32_matmul_precision("highest")


def choose_strategy(strategy: str, process_group: ProcessGroup) -> ParallelStrategy:
    """The strategy that distributes the model. Raises UserError for several processes with strategy none."""
    if process_group.size > 1 and strategy == "none":
        raise UserError(f"{process_group.size} processes were started, but strategy is none; set strategy=ddp or fsdp")
    if process_group.size == 1 or strategy == "ddp":
        return DDPStrategy(process_group)
    if strategy == "context":
        from manyformer.training.parallel_strategies import ContextStrategy

        return ContextStrategy(process_group)
    from manyformer.training.parallel_strategies import FSDPStrategy

    return FSDPStrategy(process_group)


def adapt_model(model: Model, run: RunConfig) -> None:
    """Freeze what the run freezes, and put its adapters on what remains.

    Raises UserError for unknown names, for more layers than there are, and if nothing remains to be trained."""
    freeze_parts(model, run.frozen)
    if run.frozen_layers is not None:
        freeze_layers(model, run.frozen_layers)
    if run.lora.rank is not None:
        attach_lora(model, run.lora)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError("frozen: all weights of the model are frozen, so nothing remains to be trained")


def freeze_parts(model: Model, parts: Sequence[str]) -> None:
    """Exclude the weights of the modules with these names from training. Raises UserError for unknown names."""
    modules = dict(model.named_modules())
    for part in parts:
        if part not in modules:
            raise UserError(f"frozen: the model has no part '{part}'; {suggest_names(part, filter(None, modules))}")
        _freeze(modules[part])


def freeze_layers(model: Model, layers: int | Literal["all"]) -> None:
    """Exclude the embedding and the first `layers` layers from training; with "all", everything but the head.

    Raises UserError if the model has fewer layers, or no single stack of them."""
    # modules rather than weights, so that their dropout stops as well
    if layers == "all":
        frozen = [module for name, module in model.named_children() if not is_head(name)]
    else:
        frozen = list(_lowest_layers(model, layers))
    for module in frozen:
        _freeze(module)


def _lowest_layers(model: Model, layers: int) -> Iterator[nn.Module]:
    depths = layer_depths(model, "frozen_layers")
    if layers > depths.layers:
        raise UserError(f"frozen_layers is {layers}, but the model has {depths.layers} layers; all is everything below")
    for module in model.modules():
        weights = list(module.parameters())
        if weights and all(depths.by_weight[weight] <= layers for weight in weights):
            yield module


def _freeze(module: nn.Module) -> None:
    """Exclude the weights from training, and dropout from the module: it stays in evaluation mode."""
    module.requires_grad_(requires_grad=False)
    for part in module.modules():
        part.training = False
        part.train = lambda mode=True, part=part: part  # type: ignore[method-assign, misc]
