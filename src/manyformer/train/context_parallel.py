"""Context parallelism: every process computes a part of the columns of all rows, for rows too long for one device.

Softmax attention lets keys travel in a ring, linear attention passes its state on; all other layers of the models that
are allowed process each token alone.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyformer.attention import Attention, named_attention
from manyformer.batches import Batch
from manyformer.core import Chain, Layer, Pointwise
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward, GatedFeedForward
from manyformer.kernels import named_kernels
from manyformer.kernels.kernel import TokenRing
from manyformer.models import Model
from manyformer.residual import Residual
from manyformer.sources import SelfSource, WindowSource
from manyformer.train.process_group import SINGLE_PROCESS_GROUP, DDPStrategy, ParallelStrategy, ProcessGroup

TOKENWISE_LAYERS = (Attention, Chain, FeedForward, GatedFeedForward, Pointwise, Residual)
"""The layers that process each token alone, and attention, in which tokens meet."""


@final
class ProcessRing(TokenRing):
    """The ring of all processes of torch's default group."""

    def pass_on(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        received = [torch.empty_like(tensor) for tensor in tensors]
        following = (self.rank + 1) % self.size
        previous = (self.rank - 1) % self.size
        sends = [dist.P2POp(dist.isend, tensor, following) for tensor in tensors]
        receives = [dist.P2POp(dist.irecv, tensor, previous) for tensor in received]
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
        own: Batch = self._model.own_columns(batch)
        return own

    def prepare(self, model: Model) -> nn.Module:
        self._model = model
        share_columns(self._model, ProcessRing(self.process_group.rank, self.process_group.size))
        return self._replicas.prepare(model)

    def gradient_sync(self, prepared: nn.Module, *, last: bool) -> AbstractContextManager[object]:
        return self._replicas.gradient_sync(prepared, last=last)

    def after_scoring(self, prepared: nn.Module) -> None:
        pass

    def write(self, model: Model, optimizer: torch.optim.Optimizer, folder: Path) -> None:
        self._replicas.write(model, optimizer, folder)

    def read(self, model: Model, optimizer: torch.optim.Optimizer | None, folder: Path) -> None:
        self._replicas.read(model, optimizer, folder)

    def full_model(self, model: Model) -> Model:
        return model


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
