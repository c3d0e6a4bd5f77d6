"""From a run and its data to the model, the device and the objective."""

from typing import Any

import torch

from manyformer.config import RunConfig
from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.recipes import build, get_recipe
from manyformer.train.activation_checkpointing import checkpoint_activations
from manyformer.train.data_protocols import TrainingDataProtocol
from manyformer.train.objective import TrainingObjective
from manyformer.train.parallel_strategy import DDPStrategy, ParallelStrategy, SingleProcess
from manyformer.train.process_group import ProcessGroup

_MENDS = {"source_vocab": "; set data.shared=true for one vocabulary on both sides"}

_BLOCK = "give the blocks of images as data.block=[ROWS, COLUMNS] instead"
_INSTEAD = {"rows": _BLOCK, "columns": _BLOCK}
"""What to do about a keyword that only the data may decide, where leaving it out is not all."""


def build_model(run: RunConfig, data: TrainingDataProtocol) -> Model:
    """The run's model with freshly drawn weights; the data decides some of its keywords.

    Raises UserError where the run decides one of those itself, and where the data is longer than the model allows.
    """
    known = get_recipe(run.recipe).signature.parameters
    needs = data.required_keywords | {name: value for name, value in data.offered_keywords.items() if name in known}
    for name, value in needs.items():
        if name not in known:
            raise UserError(
                f"{run.recipe} has no keyword {name}, which this data needs ({value:,}){_MENDS.get(name, '')}"
            )
        if name in run.model and run.model[name] != value:
            mend = _INSTEAD.get(name, "leave it out")
            raise UserError(f"model.{name} is {run.model[name]}, but the data makes it {value:,}; {mend}")
    keywords: dict[str, Any] = {**run.model, **needs}
    if "max_length" in known and keywords.get("max_length") is None:
        keywords["max_length"] = max(span.length for span in data.spans)
    model = build(run.recipe, **keywords)
    data.check_length(model.max_length)
    return model


def choose_device(wanted: str, world: ProcessGroup) -> torch.device:
    """The device of a run. Raises UserError where it asks for a GPU that is not there."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device is cuda, but torch finds no GPU here; set device=cpu or auto")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if world.local >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"devices asks for GPU number {world.local + 1}, and there are {count}; set devices={count}")
    return torch.device("cuda", world.local)


def choose_autocast(precision: str, device: torch.device) -> torch.dtype | None:
    """The type that forward passes compute in where it is not float32."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else None
    return torch.bfloat16 if precision == "bfloat16" else None


def make_objective(run: RunConfig, model: Model, device: torch.device) -> TrainingObjective:
    """The model on its device, with the run's loss and precision, compiled and with activations made twice if asked."""
    autocast = choose_autocast(run.precision, device)
    if autocast is not None and device.type == "cuda":
        # what autocast leaves in float32 may use the tensor cores too
        torch.set_float32_matmul_precision("high")
    if run.remat:
        checkpoint_activations(model)
    objective = TrainingObjective(model.to(device), smoothing=run.loss.smoothing, autocast=autocast)
    # on a CPU compiling takes half a minute and saves a hundredth of each step
    if run.compile == "on" or (run.compile == "auto" and device.type == "cuda"):
        objective.compile()
    return objective


def choose_sharing(strategy: str, world: ProcessGroup) -> ParallelStrategy:
    """How the processes share the model. Raises UserError where there are several and none is wanted."""
    if world.size == 1:
        return SingleProcess()
    if strategy == "none":
        raise UserError(f"{world.size} processes were started, but strategy is none; set strategy=ddp or fsdp")
    if strategy == "ddp":
        return DDPStrategy(world)
    from manyformer.train.fsdp_sharing import FSDPStrategy

    return FSDPStrategy(world)
