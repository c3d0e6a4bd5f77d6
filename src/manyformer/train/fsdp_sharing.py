"""Fully sharded data parallelism (torch's FSDP2) and sharded checkpoints.

Checkpoints are written and read by torch's distributed checkpoint engine in the safetensors format: its own format
contains a pickle, which is never read here. They can be read by any number of processes, also by one.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.recipes import build
from manyformer.train.activation_checkpointing import stack_layers
from manyformer.train.objective import TrainingObjective
from manyformer.train.optimizers import named_optimizer_state
from manyformer.train.parallel_strategy import ParallelStrategy
from manyformer.train.process_group import ProcessGroup


def shared_modules(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with weights that several of these layers share, such as position encodings."""
    occurrences = Counter(module for layer in layers for module in layer.modules())
    return [module for module, count in occurrences.items() if count > 1 and list(module.parameters(recurse=False))]


@final
class FSDPStrategy(ParallelStrategy):
    """Every process holds a shard of each weight, gathers a layer's weights to run it and gets a part of each batch."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group

    def prepare(self, objective: TrainingObjective) -> nn.Module:
        mesh = init_device_mesh(objective.model.device.type, (self.process_group.size,))
        layers = list(stack_layers(objective.model))
        common = shared_modules(layers)
        if common:
            # registered with the root module, which gathers them before any layer runs
            objective.add_module("common", nn.ModuleList(common))
        ignored = {weight for module in common for weight in module.parameters()}
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=ignored)
        fully_shard(objective, mesh=mesh)
        return objective

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(prepared, FSDPModule)
        prepared.set_requires_gradient_sync(last)
        return nullcontext()

    def after_scoring(self, prepared: nn.Module) -> None:
        assert isinstance(prepared, FSDPModule)
        # torch leaves the root module's weights gathered for a backward pass, and they would be saved unsharded
        prepared.reshard()

    def write(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        # a tied weight is written once
        weights = {name: weight.detach() for name, weight in model.named_parameters()}
        tensors = weights | _buffers(model) | named_optimizer_state(model, optimizer)
        _reraise_original(lambda: save(tensors, storage_writer=writer))

    def read(self, model: Model, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
        read_shards(model, optimizer, folder)

    def full_model(self, model: Model) -> Model:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        full_model = build(model.spec.recipe, **model.spec.keywords)
        if self.process_group.is_main_process:
            full_model.load_state_dict(state)
        return full_model


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint folder consists of shards."""
    return any(folder.glob("shard-*.safetensors"))


def read_shards(model: Model, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
    """Load model and optimizer from a checkpoint, sharded or not; the model may be sharded or not as well.

    Raises UserError if a weight is missing from the checkpoint.
    """
    reader = HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    for weight, names in _aliases(model).items():
        name = next((name for name in names if name in saved), None)
        if name is None:
            raise UserError(f"{folder} is incomplete: {names[0]} is missing")
        tensors[name] = weight.detach()
    tensors |= _buffers(model)
    if optimizer is not None:
        tensors |= _init_optimizer_state(model, optimizer, saved)
    with warnings.catch_warnings():
        # a single process reads without torch.distributed
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _reraise_original(lambda: load(tensors, storage_reader=reader))


def _aliases(model: Model) -> dict[nn.Parameter, list[str]]:
    """Every weight with all of its names; a tied weight has several, and a file stores it under one of them."""
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(weight, []).append(name)
    return aliases


def _buffers(model: Model) -> dict[str, Tensor]:
    persistent = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in persistent}


def _init_optimizer_state(model: Model, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Allocate the optimizer state that the checkpoint holds, each tensor sharded like its weight."""
    tensors: dict[str, Tensor] = {}
    weights = dict(model.named_parameters())
    for key, metadata in saved.items():
        name, slash, kind = key.rpartition("/")
        if not slash:
            continue
        if name not in weights:
            raise UserError(f"the optimizer's {key} belongs to no weight of the model")
        weight = weights[name]
        value = torch.zeros_like(weight.detach()) if metadata.size == weight.shape else torch.zeros(metadata.size)
        optimizer.state[weight][kind] = tensors[key] = value
    return tensors


def _reraise_original(action: Callable[[], object]) -> None:
    """Run `action` and raise the original error of a process, which torch wraps into a type that is no Exception."""
    try:
        action()
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
