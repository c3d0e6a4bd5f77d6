"""Comparison of the operators and shapes of two calls: only if they are equal must results agree in every bit."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyformer.check.subject import Subject
from manyformer.tasks import Inputs


def same_calls(subject: Subject, first: Inputs, second: Inputs) -> bool:
    """Whether the model runs the same operators on tensors of the same shapes for both inputs."""
    recorders = CallRecorder(), CallRecorder()
    for recorder, inputs in zip(recorders, (first, second)):
        with recorder:
            subject(inputs)
    return recorders[0].calls == recorders[1].calls


@final
class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that torch dispatches, with the shapes of its tensor arguments."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, tuple[torch.Size, ...]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        self.calls.append((str(func), tuple(tensor.shape for tensor in tensors)))
        return func(*args, **(kwargs or {}))
