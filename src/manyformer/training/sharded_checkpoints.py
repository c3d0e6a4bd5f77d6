"""Sharded checkpoints, written and read by torch's distributed checkpoint engine in the safetensors format.

The engine's own format contains a pickle, which is never read here. Shards can be read by any number of processes.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.models import Model
from manyformer.training.optimizers import named_optimizer_state, state_shapes
from manyformer.training.weight_average import AVERAGE_KIND, WeightAverage


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint folder consists of shards."""
    return any(folder.glob("shard-*.safetensors"))


def write_shards(
    model: Model, optimizer: torch.optim.Optimizer, folder: Path, average: WeightAverage | None = None
) -> None:
    """Write model, optimizer and average to a checkpoint, each process its own shard."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    # a tied weight is written once
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    tensors = weights | _buffers(model) | named_optimizer_state(model, optimizer)
    if average is not None:
        tensors |= average.named_tensors()
    _reraise_original(lambda: save(tensors, storage_writer=writer))


def read_shards(
    model: Model, optimizer: torch.optim.Optimizer | None, folder: Path, average: WeightAverage | None = None
) -> None:
    """Load model, optimizer and average from a checkpoint, sharded or not; the model may be sharded or not as well.

    Raises UserError if a weight is missing from the checkpoint.
    """
    # torch's reader compares nothing with the manifest
    VerifiedFolder.open(folder).verify()
    reader = HuggingFaceStorageReader(str(folder))
    saved = reader.read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {}
    # the file may name a tied weight by any of its names
    for weight, names in _aliases(model).items():
        name = next((name for name in names if name in saved), None)
        if name is None:
            raise UserError(f"{folder} is incomplete: {names[0]} is missing")
        tensors[name] = weight.detach()
    tensors |= _buffers(model)
    if optimizer is not None:
        tensors |= _init_optimizer_state(model, optimizer, saved)
    if average is not None:
        tensors |= average.named_tensors()
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
    shapes = state_shapes(optimizer)
    weights = {name: weight for name, weight in model.named_parameters() if weight in shapes}
    for key, metadata in saved.items():
        name, slash, kind = key.rpartition("/")
        if not slash or kind == AVERAGE_KIND:
            continue
        if name not in weights:
            raise UserError(f"the optimizer's {key} belongs to no trained weight of the model")
        weight = weights[name]
        if shapes[weight].get(kind) != metadata.size:
            raise UserError(f"the optimizer's {key} {tuple(metadata.size)} is of another optimizer than the run's")
        missing = next((part for part in shapes[weight] if f"{name}/{part}" not in saved), None)
        if missing is not None:
            raise UserError(f"the optimizer's {name}/{missing} is missing from the checkpoint")
        # a state of the weight's shape is sharded like it, a step counter and means of rows are not
        if metadata.size == weight.shape:
            value = torch.zeros_like(weight.detach())
        else:
            value = torch.zeros(metadata.size, device=weight.device)
        optimizer.state[weight][kind] = tensors[key] = value
    return tensors


def _reraise_original(action: Callable[[], object]) -> None:
    """Run `action` and raise the original error of a process, which torch wraps into a type that is no Exception."""
    try:
        action()
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
