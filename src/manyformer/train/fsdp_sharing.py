"""Fully sharded data parallelism (torch's FSDP2); `sharded_checkpoints` holds its files."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import final

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from manyformer.models import Model
from manyformer.recipes import build
from manyformer.train.activation_checkpointing import stack_layers
from manyformer.train.process_group import ParallelStrategy, ProcessGroup
from manyformer.train.sharded_checkpoints import read_shards, write_shards


def shared_modules(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """The modules with weights that several of these layers share, such as position encodings."""
    occurrences = Counter(module for layer in layers for module in layer.modules())
    return [module for module, count in occurrences.items() if count > 1 and list(module.parameters(recurse=False))]


@final
class FSDPStrategy(ParallelStrategy):
    """Every process holds a shard of each weight, gathers a layer's weights to run it and gets a part of each batch."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group

    def prepare(self, model: Model) -> nn.Module:
        mesh = init_device_mesh(model.device.type, (self.process_group.size,))
        layers = list(stack_layers(model))
        common = shared_modules(layers)
        ignored = {weight for module in common for weight in module.parameters()}
        for layer in layers:
            fully_shard(layer, mesh=mesh, ignored_params=ignored)
        # the root gathers the weights that it finds outside of layers, and it does so before any layer runs; the name
        # is not to become part of those of the weights
        model.add_module("common", nn.ModuleList(common))
        fully_shard(model, mesh=mesh)
        del model.common
        return model

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(prepared, FSDPModule)
        prepared.set_requires_gradient_sync(last)
        return nullcontext()

    def after_scoring(self, prepared: nn.Module) -> None:
        assert isinstance(prepared, FSDPModule)
        # torch leaves the root module's weights gathered for a backward pass, and they would be saved unsharded
        prepared.reshard()

    def write(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        write_shards(model, optimizer, folder)

    def read(self, model: Model, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
        read_shards(model, optimizer, folder)

    def full_model(self, model: Model) -> Model:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        full_model = build(model.spec.recipe, **model.spec.keywords)
        if self.process_group.is_main_process:
            full_model.load_state_dict(state)
        return full_model
