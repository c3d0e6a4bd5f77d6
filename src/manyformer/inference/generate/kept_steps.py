"""Captured steps between two decodings: kept with their model while its weights, settings and sizes stay."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from manyformer.inference.generate.captured_step import CapturedStep
from manyformer.models.static_step import StaticModelState
from manyformer.nn.core import MemorySequence, State, state_bytes
from manyformer.nn.masks import Mask
from manyformer.nn.runtime.devices import device_kind

MAX_KEPT_STEPS = 8
"""Captured steps that are kept with a model, the last ones used: a text of a thousand tokens passes four sizes."""
MAX_KEPT_BYTES = 1 << 30
"""Bytes of the caches that these may hold together."""

PLAIN_SETTINGS = (bool, int, float, str, type(None), Mask)
"""Types of public attributes that a graph has frozen as they were, and that have to be equal later."""


class StepForm(NamedTuple):
    """What must be equal for a captured step to serve another text."""

    model: tuple[object, ...]
    sizes: tuple[object, ...]
    numerics: tuple[object, ...]


class KeptStep(NamedTuple):
    """A captured step that no decoding uses, and its form."""

    form: StepForm
    step: CapturedStep

    @property
    def cache_bytes(self) -> int:
        """The bytes of its buffers."""
        return state_bytes((self.step.state, self.step.memory))


# the model is held weakly, and the steps let go of its parts when they are suspended: keeping them keeps no model alive
_kept: "WeakKeyDictionary[nn.Module, list[KeptStep]]" = WeakKeyDictionary()
# several threads may decode with one model, and a captured step serves one decoding at a time
_lock = threading.Lock()


def step_form(
    model: object, state: StaticModelState, memory: MemorySequence | None, position_limit: int
) -> StepForm | None:
    """The form of the model's steps for a state and source like these; None if nothing can be kept for the model."""
    if not isinstance(model, nn.Module):
        return None
    tensors = list(own_tensors(model))
    # others, such as those that are spread over devices, may keep their numbers elsewhere
    if any(type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) for tensor in tensors):
        return None
    # a graph reads weights at their addresses: one that was replaced or moved makes it useless
    places = tuple(
        (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device) for tensor in tensors
    )
    # plain settings were read when the graph was captured, and a change of one would not be noticed by a replay
    modules = tuple((id(module), type(module), *_plain_settings(module)) for module in model.modules())
    sizes = (_tree_form(state), _tree_form(memory), position_limit)
    return StepForm((places, modules), sizes, _numerics(state.tail.column.device))


def own_tensors(model: object) -> Iterator[Tensor]:
    """The parameters and buffers of a module; none of anything else."""
    if isinstance(model, nn.Module):
        yield from model.parameters()
        yield from model.buffers()


def take_step(model: object, form: StepForm | None) -> CapturedStep | None:
    """The step of this form, if one is kept: it is then the caller's alone. Steps of other weights are dropped."""
    if form is None:
        return None
    with _lock:
        entries = [entry for entry in _kept.get(model, []) if entry.form.model == form.model]  # type: ignore[call-overload]
        match = next((entry for entry in entries if entry.form == form), None)
        # taken out: two decodings at once must not write into the same buffers
        _kept[model] = [entry for entry in entries if entry is not match]  # type: ignore[index]
    return None if match is None else match.step


def keep_step(model: object, form: StepForm | None, step: CapturedStep) -> None:
    """Keep a step that its decoding needs no longer, and drop those unused for longest beyond the limits."""
    step.suspend()
    if form is None:
        return
    new = KeptStep(form, step)
    with _lock:
        entries = [entry for entry in _kept.get(model, []) if entry.form != form]  # type: ignore[call-overload]
        entries = [*entries, new][-MAX_KEPT_STEPS:]
        while entries and sum(entry.cache_bytes for entry in entries) > MAX_KEPT_BYTES:
            entries = entries[1:]
        _kept[model] = entries  # type: ignore[index]


def forget_captured_steps(model: nn.Module) -> int:
    """Drop the captured steps that are kept with a model, and the memory of their caches; returns how many there were.

    `generate` captures again when it needs one. They are dropped anyway when the model is deleted, and at the next
    decoding after weights have been replaced or moved."""
    with _lock:
        return len(_kept.pop(model, []))


def _plain_settings(module: nn.Module) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if not name.startswith("_") and isinstance(value, PLAIN_SETTINGS):
            yield name, value


def _tree_form(tree: State) -> Any:
    """The shapes, types and devices of a state's tensors in their places, and all other leaves."""
    if isinstance(tree, Tensor):
        return tree.shape, tree.dtype, tree.device
    if isinstance(tree, list | tuple):
        return type(tree), *map(_tree_form, tree)
    if isinstance(tree, dict):
        return dict, *((name, _tree_form(child)) for name, child in tree.items())
    return type(tree), tree


def _numerics(device: torch.device) -> tuple[object, ...]:
    """The settings of torch by which it selects kernels, and the stream on which a graph is replayed."""
    kind = device.type
    cuda = torch.backends.cuda
    switches: tuple[Callable[[], bool], ...] = (
        cuda.flash_sdp_enabled,
        cuda.mem_efficient_sdp_enabled,
        cuda.math_sdp_enabled,
        cuda.cudnn_sdp_enabled,
    )
    # which kernel of fused attention was captured
    fused = tuple(is_enabled() for is_enabled in switches)
    stream = 0
    if device_kind(device).captures_graphs:
        stream = torch.cuda.current_stream(device).cuda_stream
    return (
        cuda.matmul.fp32_precision,
        torch.backends.cudnn.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        fused,
        stream,
    )
