"""Whether two calls run the same operators on the same shapes: only then must equal results be equal in every bit."""

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyformer.check.subject import Inputs, Subject

Call = tuple[str, tuple[torch.Size, ...]]


def content_based(module: nn.Module | None) -> bool:
    """Whether some part says that what it computes follows from the content of tokens, not from their number alone."""
    return module is not None and any(getattr(part, "content_based", False) for part in module.modules())


def same_calls(subject: Subject, first: Inputs, second: Inputs) -> bool:
    """Whether the model runs the same operators on tensors of the same shapes for both."""
    return calls_of(subject, first) == calls_of(subject, second)


def calls_of(subject: Subject, inputs: Inputs) -> list[Call]:
    """Every operator that one forward runs, and the shapes of the tensors that it is given."""
    recorder = Recorder()
    with recorder:
        subject(inputs)
    return recorder.calls


@final
class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down every operator that torch runs, with the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, Tensor)]
        self.calls.append((str(func), tuple(tensor.shape for tensor in tensors)))
        return func(*args, **(kwargs or {}))
