"""Columns of two processes: gradients by DDP and FSDP2, and torch's checkpoints of shards."""

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from manyformer.training.layers import stack_layers
from manyformer.training.parallel_strategies import shard_model
from other_tools.comparisons import WrongResult, compare, compare_all
from other_tools.subject import Subject, output_of

PROCESSES = 2


def in_two_processes(compute: Callable[[Subject, int], None]) -> Callable[[Subject], None]:
    """A column that this process and a copy of it compute together, as ranks 0 and 1 of a gloo group."""

    def column(subject: Subject) -> None:
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            failure = Path(folder) / "failure"
            process = os.fork()
            if process == 0:
                _second_process(compute, subject, store, failure)
            try:
                _in_group(compute, subject, 0, store)
            finally:
                os.waitpid(process, 0)
            if failure.exists():
                raise WrongResult(f"in the second process alone: {failure.read_text()}")

    column.__doc__ = compute.__doc__
    return column


def _second_process(compute: Callable[[Subject, int], None], subject: Subject, store: Path, failure: Path) -> None:
    """Compute as rank 1 and end the process."""
    try:
        _in_group(compute, subject, 1, store)
    except Exception as error:
        failure.write_text(f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _in_group(compute: Callable[[Subject, int], None], subject: Subject, rank: int, store: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=PROCESSES)
    try:
        compute(subject, rank)
    finally:
        dist.destroy_process_group()


def in_training(subject: Subject) -> nn.Module:
    """The model in training, without dropout: replicas draw other masks than one process."""
    return subject.model(**({"dropout": 0.0} if subject.has_keyword("dropout") else {})).train()


def take_step(subject: Subject, model: nn.Module, plain: nn.Module, rank: int) -> None:
    """The backward pass of the batch of a rank; what a model draws by chance is decided by the rank."""
    torch.manual_seed(rank)
    batch = subject.batch(plain)
    result = model(batch)
    (result.total / max(1, batch.target_count()) + result.extra).backward()


def weight_gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients of all weights, whole where they are sharded; zero for those without one."""
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}


def gradients_of_one_process(subject: Subject) -> dict[str, Tensor]:
    """The mean of the gradients of all ranks' batches."""
    total: dict[str, Tensor] = {}
    for rank in range(PROCESSES):
        # a pass may change running means, which the other rank does not see
        model = in_training(subject)
        take_step(subject, model, model, rank)
        for name, gradient in weight_gradients(model).items():
            total[name] = total.get(name, 0) + gradient
    return {name: gradient / PROCESSES for name, gradient in total.items()}


def replicated(subject: Subject, rank: int) -> None:
    """The gradients of `DistributedDataParallel`, and a second step after them."""
    expected = gradients_of_one_process(subject)
    model = in_training(subject)
    replica = DistributedDataParallel(model)
    take_step(subject, replica, model, rank)
    compare_all(weight_gradients(model), expected)
    # which is refused where a weight took no part in the first one
    take_step(subject, replica, model, rank)


def sharded(subject: Subject, rank: int) -> None:
    """The gradients of a model whose layers, and then the model itself, were given to `fully_shard`."""
    expected = gradients_of_one_process(subject)
    model = shard(in_training(subject))
    take_step(subject, model, subject.model(), rank)
    compare_all(weight_gradients(model), expected)


def checkpointed(subject: Subject, rank: int) -> None:
    """A sharded model saved by `torch.distributed.checkpoint`, loaded into other shards and by one process."""
    plain = subject.model()
    inputs = subject.inputs(plain)
    expected = output_of(plain, inputs)
    model = shard(subject.model())
    with tempfile.TemporaryDirectory() as folder:
        # the folder of the first rank is that of both
        names = [folder]
        dist.broadcast_object_list(names)
        _reraised(lambda: dcp.save(get_model_state_dict(model), checkpoint_id=names[0]))
        others = [shard(subject.fresh()), subject.fresh()]
        for other in others:
            state = get_model_state_dict(other)
            _reraised(partial(dcp.load, state, checkpoint_id=names[0]))
            set_model_state_dict(other, state)
        dist.barrier()
    for other, what in zip(others, ("shards", "model of one process")):
        compare(output_of(other, inputs), expected, f"the loaded {what}")


def _reraised(action: Callable[[], object]) -> None:
    """Run `action` and raise the first failure of a process, which torch wraps into a type that is no Exception."""
    try:
        action()
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


def shard(model: Any) -> nn.Module:
    """Each layer, then the model; by the library's function where torch's does not know all of it."""
    layers = list(stack_layers(model))
    uses = Counter(weight for layer in layers for weight in set(layer.parameters()))
    is_shared = any(count > 1 for count in uses.values())
    has_scalars = not all(weight.ndim for weight in model.parameters())
    if is_shared or has_scalars or any(layer.entries for layer in layers):
        shard_model(model)
        return model
    for layer in layers:
        fully_shard(layer)
    fully_shard(model)
    return model


COLUMNS = {
    "DDP": in_two_processes(replicated),
    "FSDP2": in_two_processes(sharded),
    "dcp": in_two_processes(checkpointed),
}
