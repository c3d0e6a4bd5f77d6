"""What an item of `gpu.py` finds out, and the setting that all items share."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

Verdict = Literal["passed", "failed", "not run"]

TINY_RECIPES = ("transformer-lm", "longformer-lm", "linear-transformer", "reformer-strict")
"""What a rehearsal checks: dense, sparse, linear and content-based attention."""


class Outcome(NamedTuple):
    """The verdict on an item with a sentence, what was measured, and the paths that computed it."""

    verdict: Verdict
    sentence: str
    numbers: Mapping[str, float] = {}
    paths: tuple[str, ...] = ()


Item = Callable[[], Outcome]


@dataclass(frozen=True)
class Setting:
    """The device that is measured, and whether sizes are tiny: then it is a rehearsal."""

    device: torch.device
    tiny: bool

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def has_goals(self) -> bool:
        """Whether goals of speed apply: on a GPU with sizes that fill it."""
        return self.on_gpu and not self.tiny

    def autocast(self) -> AbstractContextManager[Any]:
        """bfloat16 where a GPU has it; float32 elsewhere."""
        return torch.autocast("cuda", torch.bfloat16) if self.on_gpu else nullcontext()


def judged(sentence: str, misses: Iterable[str], numbers: Mapping[str, float], paths: Iterable[str] = ()) -> Outcome:
    """The outcome of a measurement: failed if any goal was missed, with the misses in the sentence."""
    missed = list(misses)
    verdict: Verdict = "failed" if missed else "passed"
    return Outcome(verdict, "; ".join([sentence, *missed]), numbers, tuple(dict.fromkeys(paths)))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference as a share of the largest expected magnitude; nan where anything is not finite."""
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    if actual.shape != expected.shape or not torch.isfinite(actual).all():
        return float("nan")
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)) if expected.numel() else 0.0
