"""The strategies that divide a model or its rows among processes; replicas are in `process_group`.

Fully sharded data parallelism (torch's FSDP2) divides the weights, and `sharded_checkpoints` holds its files. Context
parallelism divides the columns of all rows, for rows too long for one device: softmax attention lets keys travel in a
ring, linear attention passes its state on, all other layers of the models that are allowed process each token alone.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from manyformer.base.errors import UserError
from manyformer.models import Model
from manyformer.models.model import model_name
from manyformer.nn.attention.attention import Attention, named_attention
from manyformer.nn.attention.kv_cache import SelfSource, WindowSource
from manyformer.nn.batches import Batch
from manyformer.nn.core import Chain, Layer, Pointwise
from manyformer.nn.feed_forward.feedforward import FeedForward, GatedFeedForward
from manyformer.nn.kernels.kernel import TokenRing, named_kernels
from manyformer.nn.residual import Residual
from manyformer.recipes import build
from manyformer.training.layers import stack_layers
from manyformer.training.process_group import SINGLE_PROCESS_GROUP, DDPStrategy, ParallelStrategy, ProcessGroup
from manyformer.training.sharded_checkpoints import read_shards, write_shards
from manyformer.training.weight_average import WeightAverage

TOKENWISE_LAYERS = (Attention, Chain, FeedForward, GatedFeedForward, Pointwise, Residual)
"""The layers that process each token alone, and attention, in which tokens meet."""


@final
class FSDPStrategy(ParallelStrategy):
    """Every process holds a shard of each weight, gathers a layer's weights to run it and gets a part of each batch."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group

    def prepare(self, model: Model) -> nn.Module:
        shard_model(model, mesh=init_device_mesh(model.device.type, (self.process_group.size,)))
        return model

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        assert isinstance(prepared, FSDPModule)
        prepared.set_requires_gradient_sync(last)
        return nullcontext()

    def after_scoring(self, prepared: nn.Module) -> None:
        assert isinstance(prepared, FSDPModule)
        # torch leaves the root module's weights gathered for a backward pass, and they would be saved unsharded
        prepared.reshard()

    def write(
        self, model: Model, optimizer: torch.optim.Optimizer, folder: Path, average: WeightAverage | None = None
    ) -> None:
        write_shards(model, optimizer, folder, average)

    def read(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | None,
        folder: Path,
        average: WeightAverage | None = None,
    ) -> None:
        read_shards(model, optimizer, folder, average)

    def full_model(self, model: Model) -> Model:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        # a new model, because the weights of this one are shards
        full_model = build(model.spec.recipe, **model.spec.keywords)
        if self.process_group.is_main_process:
            full_model.load_state_dict(state)
        return full_model


def shard_model(model: Model, **options: Any) -> None:
    """Let each layer of the model's stacks, and the model around them, be a unit of torch's `fully_shard`.

    A weight that several layers share belongs to the unit of the model: that of a layer would release it after the
    layer, and each of the others would have a weight of its own. `options` are those of `fully_shard`. Raises UserError
    for a model with a scalar weight."""
    if scalar := next((name for name, weight in model.named_parameters() if not weight.ndim), None):
        raise UserError(
            f"strategy=fsdp (torch's fully_shard) divides no scalars, and {scalar} of {model_name(model)} is one: "
            "strategy=ddp trains it"
        )
    # a layer is the unit of sharding: its weights are gathered to run it, and released
    layers = list(stack_layers(model))
    uses = Counter(weight for layer in layers for weight in set(layer.parameters()))
    shared = {weight for weight, count in uses.items() if count > 1}
    for layer in layers:
        fully_shard(layer, ignored_params=shared, **options)
        for entry in layer.entries:
            register_fsdp_forward_method(layer, entry)
    modules = dict.fromkeys(module for layer in layers for module in layer.modules())
    common = [module for module in modules if shared & set(module.parameters(recurse=False))]
    # the root gathers the weights that it finds outside of layers, and it does so before any layer runs; the name is
    # not to become part of those of the weights
    model.add_module("common", nn.ModuleList(common))
    fully_shard(model, **options)
    del model.common


@final
class ContextStrategy(ParallelStrategy):
    """Every process holds a replica and computes a part of the columns of each row."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self.process_group = process_group
        self._replicas = DDPStrategy(process_group)

    @property
    def data_group(self) -> ProcessGroup:
        # positions follow from whole rows, so that every process reads all of them
        return SINGLE_PROCESS_GROUP

    def local_batch(self, batch: Batch) -> Batch:
        columns: Batch = self._model.own_columns(batch)
        return columns

    def prepare(self, model: Model) -> nn.Module:
        self._model = model
        share_columns(self._model, ProcessRing(self.process_group.rank, self.process_group.size))
        return self._replicas.prepare(model)

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return self._replicas.gradient_sync(prepared, last=last)

    def after_scoring(self, prepared: nn.Module) -> None:
        pass

    def write(
        self, model: Model, optimizer: torch.optim.Optimizer, folder: Path, average: WeightAverage | None = None
    ) -> None:
        self._replicas.write(model, optimizer, folder, average)

    def read(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | None,
        folder: Path,
        average: WeightAverage | None = None,
    ) -> None:
        self._replicas.read(model, optimizer, folder, average)

    def full_model(self, model: Model) -> Model:
        return model


@final
class ProcessRing(TokenRing):
    """The ring of all processes of torch's default group."""

    def pass_on(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        received = [torch.empty_like(tensor) for tensor in tensors]
        following = (self.rank + 1) % self.size
        previous = (self.rank - 1) % self.size
        sends = [dist.P2POp(dist.isend, tensor, following) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, previous) for tensor in received]
        # in one batch: a ring in which everyone sends before receiving would stand still
        for work in dist.batch_isend_irecv([*sends, *receives]):
            work.wait()
        return received

    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        for tensor in tensors:
            dist.send(tensor, rank)

    def receive(self, like: Sequence[Tensor], rank: int) -> list[Tensor]:
        received = [torch.empty_like(tensor) for tensor in like]
        for tensor in received:
            dist.recv(tensor, rank)
        return received


def column_span(length: int, ring: TokenRing) -> tuple[int, int]:
    """The first column of this process, and the one after its last. Raises UserError for unequal parts."""
    if length % ring.size:
        raise UserError(f"strategy=context divides rows of {length} tokens among {ring.size} processes, unequally")
    part = length // ring.size
    return part * ring.rank, part * (ring.rank + 1)


def share_columns(model: Model, ring: TokenRing) -> None:
    """Let `model` compute this process's columns of the rows that it is given, in training and scoring.

    Module names and weights do not change. Raises UserError for a model with another way for tokens to meet.
    """
    if (reason := find_obstacle(model)) is not None:
        raise UserError(f"strategy=context cannot divide the rows of {model.spec.recipe}: {reason}")
    model.column_span = lambda length: column_span(length, ring)
    for kernel in named_kernels(model).values():
        kernel.share_columns(ring)


def find_obstacle(model: Model) -> str | None:
    """Why the columns of the rows of a model cannot be divided among processes; None if they can."""
    if not model.divides_columns or getattr(model, "auxiliary", None) is not None:
        return "it needs a language model whose only loss is that of the last layer"
    for layer in model.modules():
        if isinstance(layer, Layer) and type(layer) not in TOKENWISE_LAYERS:
            return f"tokens meet in {type(layer).__name__}, not in attention alone"
    obstacles = map(_find_attention_obstacle, named_attention(model).values())
    return next((reason for reason in obstacles if reason is not None), None)


def _find_attention_obstacle(layer: Attention) -> str | None:
    source = layer.source
    seams = layer.position.required_seams() & {"score", "value"}
    if type(source) not in (SelfSource, WindowSource):
        return f"keys come from {type(source).__name__}, not from the row alone"
    if layer.short_convolution is not None:
        return "short convolutions read the tokens before"
    if seams:
        return f"{type(layer.position).__name__} acts on scores, and keys of other processes have none here"
    return layer.kernel.column_obstacle()
