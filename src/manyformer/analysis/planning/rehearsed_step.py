"""The operations and the memory of a training step of any recipe, without its weights wherever shapes decide them.

Such a step runs on the `meta` device, which has shapes alone: `ShapeRules` says what torch leaves undefined there.
Attention takes the kernel that a CPU would take, a mask selects a stated share of its elements, and autocast to a
narrower dtype is done by hand, because torch has none for this device."""

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from manyformer.base.errors import UserError
from manyformer.models import BatchLoss, Model
from manyformer.nn.batches import IGNORE_INDEX, Batch
from manyformer.nn.core import tree_map
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.runtime.shapes_alone import ShapesAlone
from manyformer.nn.runtime.torch_internals import TorchDispatchMode, tree_leaves
from manyformer.nn.runtime.torch_internals import tree_map as map_arguments
from manyformer.recipes import build
from manyformer.recipes.parts.model_summary import count_parameters, is_content_based
from manyformer.recipes.parts.registry import build_on_meta, task_of
from manyformer.training.layers import checkpoint_activations

if TYPE_CHECKING:
    from manyformer.training.step_job import StepJob

MAX_REAL_PARAMETERS = 100_000_000
"""The largest model that is built with weights where shapes alone do not decide its operations."""

BY_SHAPES = "counted from shapes"
BY_RUNNING = "counted in a step of real weights"

_ATEN = torch.ops.aten
_INDEXED = {_ATEN.index.Tensor, _ATEN.index_put.default, _ATEN.index_put_.default, _ATEN._index_put_impl_.default}
_FUSED = _ATEN._scaled_dot_product_flash_attention_for_cpu.default

_NARROW = {
    *(F.linear, F.conv1d, F.conv2d, F.scaled_dot_product_attention),
    *(torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.__matmul__, Tensor.bmm),
}

_WIDE = {F.layer_norm, F.rms_norm, F.softmax, F.log_softmax, F.cross_entropy, torch.softmax, Tensor.softmax}

_SDPA = F.scaled_dot_product_attention


@dataclass(frozen=True)
class RehearsedCost:
    """One forward and backward pass over `rows` rows of `length` tokens on one device; sizes in bytes.

    `flops` are those of `manyformer.nn.runtime.costs`. `activations` and `logits` are what the forward pass leaves for
    the backward pass; `peak` is the largest sum of these, gradients and temporary tensors at any time, without weights
    and moments, and `row_peak` what each further row adds to it. `method` says how it was counted.
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
            # around all other modes, which see the operators that it answers
            with ShapesAlone():
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
    # what the process has loaded is not looked through for cycles of each pass
    gc.freeze()
    try:
        step = StepRehearsal(model, rows, length, autocast)
        flops = step.flops()
        memory = step.memory()
        # the peak is not proportional to the rows: gradients of weights and buffers do not grow with them
        doubled = StepRehearsal(model, 2 * rows, length, autocast).memory()
    finally:
        gc.unfreeze()
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
        # random tokens, because equal ones would all meet in one bucket or one expert
        tokens = torch.randint(task.token_ids(model), (rows, self.length), generator=generator)
        inputs = task.example(model, tokens)
        targets = task.random_targets(model, inputs, generator)
        self.selected = 1.0
        if isinstance(targets, Tensor) and not targets.is_floating_point():
            # a masked language model computes logits of the masked tokens alone
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
        # cycles of the pass before would still hold their tensors, and be released inside of the measured one
        gc.collect()
        with self._rules():
            # outside of the measured pass, which must not see these logits
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

    def as_job(self) -> "StepJob":
        """The step with its optimizer, to be timed on a real device."""
        # imported here because a step that is counted alone needs no engine
        from manyformer.training.step_job import StepJob, own_engine

        return StepJob(own_engine(self.model, autocast=self.autocast), [self._batch()])


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


@final
class LiveMemoryMode(TorchDispatchMode):
    """Dispatch mode whose `live` is the number of bytes of all storages created in it that still exist.

    `peak` is its maximum so far, and `live_logits` the bytes of those whose last axis has `classes` elements. Storages
    of `known` tensors, such as parameters, are not counted. It follows any device, `meta` included, where tensors have
    sizes and no memory.
    """

    def __init__(self, known: Iterable[Tensor] = (), *, classes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self.live_logits = 0
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
        # views and results in place share a storage that is counted already
        if number in self._known_ids or number in self._sizes:
            return
        is_logits = tensor.ndim > 1 and tensor.shape[-1] == self._classes and tensor.is_floating_point()
        self._sizes[number] = storage.nbytes()
        self.live += storage.nbytes()
        self.live_logits += storage.nbytes() * is_logits
        self.peak = max(self.peak, self.live)
        # the storage, not the tensor: views keep it alive after the tensor that made it
        weakref.finalize(storage, self._release, number, is_logits=is_logits)

    def _release(self, number: int, *, is_logits: bool) -> None:
        size = self._sizes.pop(number, 0)
        self.live -= size
        self.live_logits -= size * is_logits


@final
class ShapeRules:
    """Context manager in which a training step runs on the `meta` device.

    Boolean masks select the share `selected` of their elements, whose number is unknown without data. Products run in
    `autocast`, None for the dtype of the weights.
    """

    def __init__(self, *, selected: float = 1.0, autocast: torch.dtype | None = None) -> None:
        self.selected = selected
        self.autocast = autocast

    def __enter__(self) -> Self:
        self._modes = ExitStack()
        if self.autocast is not None:
            self._modes.enter_context(_Autocast(self.autocast))
        self._modes.enter_context(_fused_attention())
        # last, so that it sees the operators that the others leave
        self._modes.enter_context(_Selections(self.selected))
        return self

    def __exit__(self, *details: Any) -> None:
        self._modes.close()


@final
class _Autocast(TorchFunctionMode):
    """Autocast by the lists of torch for GPUs: products in the narrow dtype, sums and norms in float32.

    The narrow copy of a weight lives as long as the mode, as torch's cache of them does.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self._weights: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _NARROW or func in _WIDE:
            cast = self._narrow if func in _NARROW else _widen
            args, kwargs = map_arguments(cast, (tuple(args), kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _narrow(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(self.dtype)
        # with the weight itself, so that its id is not given to another tensor while the mode lives
        if id(value) not in self._weights:
            self._weights[id(value)] = value, value.to(self.dtype)
        return self._weights[id(value)][1]


def _widen(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.float()
    return value


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Computes attention as torch's fused kernel for CPUs where a CPU would; on `meta`, torch forms all weights.

    The function itself is replaced, because function modes do not apply to what layers compute again in a backward
    pass, such as reversible ones.
    """
    F.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = _SDPA


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002 - the signature is torch's
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    q = query
    k = key
    v = value
    has_bias_gradient = attn_mask is not None and attn_mask.requires_grad
    # what the fused kernel of CPUs does not take either
    if q.device.type != "meta" or q.ndim != 4 or dropout_p or has_bias_gradient or q.shape[-1] != v.shape[-1]:
        options: dict[str, Any] = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        return _SDPA(q, k, v, attn_mask, **options)
    if enable_gqa:
        # shapes alone: on `meta` the copies take no memory
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    y: Tensor = _FUSED(q, k, v, 0.0, is_causal, attn_mask=None, scale=scale)[0]
    return y


@final
class _Selections(TorchDispatchMode):
    """Lets boolean masks select a share of all elements."""

    def __init__(self, share: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.share = share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ATEN.nonzero.default and args[0].device.type == "meta":
            return self._indices(args[0])
        if func is _ATEN.masked_select.default and args[0].device.type == "meta":
            size = torch.broadcast_shapes(args[0].shape, args[1].shape).numel()  # type: ignore[no-untyped-call]
            # how many elements a mask selects is known with data alone
            return args[0].new_empty(round(self.share * size))
        if func in _INDEXED and args[0].device.type == "meta":
            args = (args[0], [part for index in args[1] for part in self._numbers(index)], *args[2:])
        return func(*args, **(kwargs or {}))

    def _numbers(self, index: Tensor | None) -> list[Tensor | None]:
        """A mask as one index for each of its axes; other indices as they are."""
        if index is None or index.dtype != torch.bool:
            return [index]
        return list(self._indices(index).unbind(-1))

    def _indices(self, mask: Tensor) -> Tensor:
        return torch.empty(round(self.share * mask.numel()), mask.ndim, dtype=torch.long, device="meta")
