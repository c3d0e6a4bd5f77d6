"""The operators that a model runs for given inputs, which show whether two results can be compared bit for bit."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from manyformer.check.token_exchange import Forward
from manyformer.tasks import Inputs
from manyformer.torch_internals import TorchDispatchMode, tree_leaves


class OperatorCall(NamedTuple):
    """One call of an operator, with the shapes of its tensor arguments and results."""

    name: str
    shapes: tuple[torch.Size, ...]
    is_random: bool


def record_calls(forward: Forward, inputs: Inputs) -> list[OperatorCall]:
    """The calls of operators by `forward`, in order."""
    recorder = CallRecorder()
    with recorder:
        forward(inputs)
    return recorder.calls


def random_calls(forward: Forward, inputs: Inputs) -> list[OperatorCall]:
    """The calls that draw random numbers, in order."""
    return [call for call in record_calls(forward, inputs) if call.is_random]


@final
class CallRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every operator that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {}, result)) if isinstance(leaf, Tensor)]
        shapes = tuple(tensor.shape for tensor in tensors)
        self.calls.append(OperatorCall(str(func), shapes, torch.Tag.nondeterministic_seeded in func.tags))
        return result
