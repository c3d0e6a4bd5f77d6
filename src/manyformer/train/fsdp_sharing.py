"""A share of every weight in each process (torch's FSDP2), and checkpoints whose files are such shares.

They are written and read by torch's distributed checkpoint engine in the safetensors format: its own format keeps a
pickle, which we never read. Reading fits them to any number of processes, one among them.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
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
from torch.distributed.tensor import DTensor

from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.recipes import build
from manyformer.train.activation_checkpointing import numbered_layers
from manyformer.train.objective import TrainingObjective
from manyformer.train.optimizers import named_state
from manyformer.train.parallel_strategy import ParallelStrategy
from manyformer.train.process_group import ProcessGroup


def shared_parts(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The parts with weights that several of these layers have in common, such as positions."""
    found: dict[int, list[nn.Module]] = {}
    for layer in layers:
        for part in layer.modules():
            if any(True for _ in part.parameters(recurse=False)):
                found.setdefault(id(part), []).append(part)
    return [parts[0] for parts in found.values() if len(parts) > 1]


@final
class FSDPStrategy(ParallelStrategy):
    """Every process keeps a share of each weight, gathers a layer's while it runs, and sees a part of each batch."""

    def __init__(self, world: ProcessGroup) -> None:
        self.world = world

    def prepare(self, objective: TrainingObjective) -> nn.Module:
        mesh = init_device_mesh(objective.model.device.type, (self.world.size,))
        layers = list(numbered_layers(objective.model))
        common = shared_parts(layers)
        if common:
            # within reach of the whole, which gathers them before any layer runs
            objective.add_module("common", nn.ModuleList(common))
        ignored = {weight for part in common for weight in part.parameters()}
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=ignored)
        fully_shard(objective, mesh=mesh)
        return objective

    def one_pass(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(prepared, FSDPModule)
        prepared.set_requires_gradient_sync(last)
        return nullcontext()

    def after_scoring(self, prepared: nn.Module) -> None:
        assert isinstance(prepared, FSDPModule)
        # torch keeps the outermost weights gathered for a backward pass, and they would be saved as they lie there
        prepared.reshard()

    def norm(self, norm: Tensor) -> Tensor:
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def write(self, model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
        writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
        _first_error(lambda: save(state_of(model, optimiser), storage_writer=writer))

    def read(self, model: Model, optimiser: torch.optim.Optimizer, folder: Path) -> None:
        read_shards(model, optimiser, folder)

    def read_weights(self, model: Model, folder: Path) -> None:
        read_shards(model, None, folder)

    def whole(self, model: Model) -> Model:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        plain = build(model.spec.recipe, **model.spec.keywords)
        if self.world.first:
            plain.load_state_dict(state)
        return plain


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint consists of shares."""
    return any(folder.glob("shard-*.safetensors"))


def state_of(model: Model, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors that a checkpoint keeps, a tied weight once, the optimiser's under `NAME/KIND`."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return weights | _buffers(model) | named_state(model, optimiser)


def read_shards(model: Model, optimiser: torch.optim.Optimizer | None, folder: Path) -> None:
    """Fill model and optimiser from a checkpoint, in shares or in one piece, whatever share of each weight is ours.

    Raises UserError where the checkpoint lacks something.
    """
    reader = HuggingFaceStorageReader(str(folder))
    kept = reader.read_metadata().state_dict_metadata
    wanted: dict[str, Tensor] = {}
    for names, weight in _aliases(model):
        name = next((name for name in names if name in kept), None)
        if name is None:
            raise UserError(f"{folder} is incomplete: {names[0]} is missing")
        wanted[name] = weight.detach()
    wanted |= _buffers(model)
    if optimiser is not None:
        wanted |= _room_for_state(model, optimiser, kept)
    with warnings.catch_warnings():
        # one process needs no others to read
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        _first_error(lambda: load(wanted, storage_reader=reader))


def _aliases(model: Model) -> Iterable[tuple[list[str], nn.Parameter]]:
    """Every weight with all of its names; a tied one has several, and a file keeps it under one of them."""
    found: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, weight in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(weight), ([], weight))[0].append(name)
    return found.values()


def _buffers(model: Model) -> dict[str, Tensor]:
    kept = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in kept}


def _room_for_state(model: Model, optimiser: torch.optim.Optimizer, kept: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors for what the checkpoint keeps of the optimiser, shared as their weights are, already in their place."""
    room: dict[str, Tensor] = {}
    weights = dict(model.named_parameters())
    for key, about in kept.items():
        name, slash, kind = key.rpartition("/")
        if not slash:
            continue
        if name not in weights:
            raise UserError(f"the optimiser's {key} belongs to no weight of the model")
        weight = weights[name]
        value = torch.zeros_like(weight.detach()) if about.size == weight.shape else torch.zeros(about.size)
        optimiser.state[weight][kind] = room[key] = value
    return room


def _first_error(action: Callable[[], object]) -> None:
    """Torch wraps what goes wrong in any process into something that is no Exception; raise the thing itself."""
    try:
        action()
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
