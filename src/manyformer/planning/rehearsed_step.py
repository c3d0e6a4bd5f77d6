"""The operations and the memory of a training step of any recipe, without its weights wherever shapes decide them."""

import gc
import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from manyformer.batches import IGNORE_INDEX, Batch
from manyformer.core import tree_map
from manyformer.costs import count_flops
from manyformer.errors import UserError
from manyformer.model_summary import build_on_meta, count_parameters, is_content_based
from manyformer.models import BatchLoss, Model
from manyformer.planning.shape_rules import ShapeRules
from manyformer.recipes import build
from manyformer.recipes.registry import task_of
from manyformer.torch_internals import TorchDispatchMode, tree_leaves
from manyformer.train.layers import checkpoint_activations
from manyformer.train.step_job import StepJob, own_engine

MAX_REAL_PARAMETERS = 100_000_000
"""The largest model that is built with weights where shapes alone do not decide its operations."""

BY_SHAPES = "counted from shapes"
BY_RUNNING = "counted in a step of real weights"


@final
class LiveMemoryMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode whose `live` is the number of bytes of all storages created in it that still exist.

    `peak` is its maximum so far, and `live_logits` the bytes of those whose last axis has `classes` elements. Storages
    of `known` tensors, such as parameters, are not counted. It follows any device, `meta` included, where tensors have
    sizes and no memory.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, classes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = self.live_logits = 0
        self._classes = classes
        self._sizes: dict[int, int] = {}
        # the objects are kept, so that their numbers are not given to new storages
        self._known = [tensor.untyped_storage() for tensor in known]
        self._known_ids = {storage._cdata for storage in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        number = storage._cdata
        if number in self._known_ids or number in self._sizes:
            return
        is_logits = tensor.ndim > 1 and tensor.shape[-1] == self._classes and tensor.is_floating_point()
        self._sizes[number] = storage.nbytes()
        self.live += storage.nbytes()
        self.live_logits += storage.nbytes() * is_logits
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, number, is_logits=is_logits)

    def _release(self, number: int, *, is_logits: bool) -> None:
        size = self._sizes.pop(number, 0)
        self.live -= size
        self.live_logits -= size * is_logits


@dataclass(frozen=True)
class RehearsedCost:
    """One forward and backward pass over `rows` rows of `length` tokens on one device; sizes in bytes.

    `flops` are those of `manyformer.costs`. `activations` and `logits` are what the forward pass leaves for the
    backward pass; `peak` is the largest sum of these, gradients and temporary tensors at any time, without weights and
    moments, and `row_peak` what each further row adds to it. `method` says how it was counted.
    """

    rows: int
    length: int
    parameters: int
    flops: int
    activations: int
    logits: int
    peak: int
    row_peak: int
    method: str


@dataclass(frozen=True)
class StepMemory:
    """The memory of one simulated or real pass."""

    activations: int
    logits: int
    peak: int


def step_cost(
    recipe: str,
    keywords: dict[str, Any],
    *,
    rows: int,
    length: int,
    bfloat16: bool = False,
    checkpointing: bool = False,
) -> RehearsedCost:
    """The cost of a training step; `checkpointing` recomputes layers as `activation_checkpointing` does.

    Raises UserError for a length beyond the model's, and for a model too large to be run whose operations depend on
    the content of its tokens.
    """
    model = build_on_meta(recipe, keywords).train()
    model.check_length(length)
    if checkpointing:
        checkpoint_activations(model)
    autocast = None
    if bfloat16 and model.allows_autocast:
        autocast = torch.bfloat16
    if not is_content_based(model):
        try:
            return _counted(model, rows, length, autocast, BY_SHAPES)
        except (NotImplementedError, RuntimeError):
            # an operator of it needs values
            pass
    parameters = count_parameters(model)
    if parameters > MAX_REAL_PARAMETERS:
        raise UserError(
            f"the operations of {recipe} depend on values, so that it must be run to be planned, and {parameters:,} "
            f"parameters are too many: at most {MAX_REAL_PARAMETERS:,}; plan a smaller model of it"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(recipe, **keywords).train()
        if checkpointing:
            checkpoint_activations(model)
        # hashes and tokens are drawn with the same seed: the same plan every time
        return _counted(model, rows, length, autocast, BY_RUNNING)


def _counted(model: Model, rows: int, length: int, autocast: torch.dtype | None, method: str) -> RehearsedCost:
    step = StepRehearsal(model, rows, length, autocast)
    flops = step.flops()
    memory = step.memory()
    doubled = StepRehearsal(model, 2 * rows, length, autocast).memory()
    row_peak = max(0, doubled.peak - memory.peak) // rows
    sizes = memory.activations, memory.logits, memory.peak
    return RehearsedCost(rows, step.length, count_parameters(model), flops, *sizes, row_peak, method)


class StepRehearsal:
    """A training step on random tokens, on the device of the model: `meta` for its shapes alone."""

    def __init__(self, model: Model, rows: int, length: int, autocast: torch.dtype | None) -> None:
        self.model = model
        self.autocast = autocast
        task = task_of(model)
        generator = torch.Generator().manual_seed(0)
        self.length = task.fixed_length(model) or length
        tokens = torch.randint(task.token_ids(model), (rows, self.length), generator=generator)
        inputs = task.example(model, tokens)
        targets = task.random_targets(model, inputs, generator)
        self.selected = 1.0
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            self.selected = float((targets != IGNORE_INDEX).float().mean())
        self._inputs, self._targets = (tree_map(lambda x: x.to(model.device), part) for part in (inputs, targets))

    def flops(self) -> int:
        """The operations of a step, after one that fills caches, such as plans of sparse attention."""
        self._run()
        flops = count_flops(self._run)
        self.model.zero_grad(set_to_none=True)
        return flops

    def memory(self) -> StepMemory:
        """The memory of a step."""
        self._run()
        self.model.zero_grad(set_to_none=True)
        gc.collect()
        with self._rules():
            classes = self._logits().shape[-1]
            with LiveMemoryMode(_tensors(self.model), classes=classes) as mode:
                loss = self._loss()
                activations = mode.live
                logits = mode.live_logits
                loss.backward()  # type: ignore[no-untyped-call]
        self.model.zero_grad(set_to_none=True)
        return StepMemory(activations - logits, logits, mode.peak)

    def _run(self) -> None:
        with self._rules():
            self._loss().backward()  # type: ignore[no-untyped-call]

    def _logits(self) -> Tensor:
        with torch.no_grad():
            return task_of(self.model).call(self.model, self._inputs).logits

    def _loss(self) -> Tensor:
        with self._autocast():
            loss: BatchLoss = self.model(self._batch())
        return loss.total / loss.targets + loss.extra

    def _batch(self) -> Batch:
        return task_of(self.model).batch(self.model, self._inputs, self._targets)

    def _rules(self) -> AbstractContextManager[Any]:
        if self.model.device.type == "meta":
            return ShapeRules(selected=self.selected, autocast=self.autocast)
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast is None or self.model.device.type == "meta":
            return nullcontext()
        return torch.autocast(self.model.device.type, self.autocast)

    def as_job(self) -> StepJob:
        """The step with its optimizer, to be timed on a real device."""
        return StepJob(own_engine(self.model, autocast=self.autocast), [self._batch()])


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]
