"""Comparison of the operators and shapes of two calls: only if they are equal must results agree in every bit."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyformer.check.subject import Subject
from manyformer.tasks import Inputs

OperatorCall = tuple[str, tuple[torch.Size, ...]]


def has_content_based_part(module: nn.Module | None) -> bool:
    """Whether some part declares (`content_based`) that its operators depend on token values, not on shapes alone."""
    return module is not None and any(getattr(part, "content_based", False) for part in module.modules())


def same_calls(subject: Subject, first: Inputs, second: Inputs) -> bool:
    """Whether the model runs the same operators on tensors of the same shapes for both inputs."""
    return record_calls(subject, first) == record_calls(subject, second)


def record_calls(subject: Subject, inputs: Inputs) -> list[OperatorCall]:
    """Every operator of one forward pass, with the shapes of its tensor arguments."""
    recorder = CallRecorder()
    with recorder:
        subject(inputs)
    return recorder.calls


@final
class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that torch dispatches, with the shapes of its tensor arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        self.calls.append((str(func), tuple(tensor.shape for tensor in tensors)))
        return func(*args, **(kwargs or {}))
