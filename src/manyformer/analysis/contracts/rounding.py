"""How far rounding alone moves the logits of a module, and whether its twin in float64 can tell it from a fault."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from manyformer.analysis.contracts.isolation import in_dtype, restoring_attributes
from manyformer.nn.runtime.torch_internals import TorchDispatchMode, tree_leaves

MAX_TOLERANCE = 0.1
"""A model whose rounding moves its logits by more could hide any fault, and is compared as if it moved them by this."""

JITTERS = 3
"""How often the weights are moved by their rounding."""

SAFETY = 4
"""How much further apart than moved weights two orders of the same sums may be."""

HALVES = (torch.bfloat16, torch.float16)


@final
class DtypeRecorder(TorchDispatchMode):
    """Records the floating dtypes of all results, and whether numbers in float64 are written with fewer bits."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: set[torch.dtype] = set()
        self.casts_down = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = _floating_dtypes((args, kwargs or {}))
        written = _floating_dtypes(result)
        # tables of positions may be computed in any dtype: what counts is what happens to the numbers of the model
        self.casts_down |= torch.float64 in given and bool(written - {torch.float64})
        self.dtypes |= written
        return result


def _floating_dtypes(tree: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()}


def has_float64_twin(module: nn.Module, run: Callable[[], Tensor]) -> bool:
    """Whether `run` computes in float64 throughout when the module is converted, so that no rounding is left."""
    recorder = DtypeRecorder()
    try:
        # models keep tables that they computed, which would stay in float64
        with restoring_attributes(module), in_dtype(module, torch.float64), recorder:
            logits = run()
    # a kernel without float64, or a constant of float32 inside of the model
    except Exception:
        return False
    return logits.dtype == torch.float64 and not recorder.casts_down


def rounding_tolerance(module: nn.Module, run: Callable[[], Tensor], *, least: float) -> float:
    """The difference that rounding explains, relative to the largest logit: by weights that are moved by theirs."""
    recorder = DtypeRecorder()
    with recorder:
        expected = run()
    precisions = [torch.finfo(dtype).eps for dtype in (recorder.dtypes & set(HALVES)) or {torch.float32}]
    scale = expected.abs().max().clamp(min=1e-12)
    spreads = []
    for seed in range(JITTERS):
        with _moved_weights(module, max(precisions), seed):
            spreads.append(float((run() - expected).abs().max() / scale))
    # the median, because a choice that flips once says nothing about rounding
    spread = statistics.median(spreads)
    return max(least, min(SAFETY * spread, MAX_TOLERANCE))


@contextmanager
def _moved_weights(module: nn.Module, size: float, seed: int) -> Iterator[None]:
    weights = [weight for weight in module.parameters() if weight.is_floating_point()]
    originals = [weight.data for weight in weights]
    generator = torch.Generator().manual_seed(seed)
    try:
        for weight in weights:
            noise = torch.rand(weight.shape, generator=generator).to(weight)
            weight.data = weight.data * (1 + size * (2 * noise - 1))
        yield
    finally:
        for weight, original in zip(weights, originals):
            weight.data = original
