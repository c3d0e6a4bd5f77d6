"""Handwritten gradients that are single operations in graphs of `torch.compile`.

A compiler traces a handwritten gradient like all other code, so that loops over blocks are unrolled for one length, and
writing to parts of a buffer ends the graph. As one operation, the function runs in a graph as it does outside, for any
length. The gradient computes the forward pass again, so that the graph saves the inputs alone.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from manyformer.nn.runtime.handwritten_gradient import HandwrittenGradient
from manyformer.nn.runtime.torch_internals import constant_for_compiler, is_compiled_for_any

FUNCTIONS: dict[str, "type[OneOperation]"] = {}
"""All functions by their names in graphs."""

NAMESPACE = "manyformer"
ARGUMENTS = "str name, str kinds, Tensor[] tensors, SymInt[] sizes, float[] numbers"
"""What both operations take: a function's arguments by kind, as a schema has no lists of mixed ones."""

DIFFERENTIATED, TENSOR, SIZE, NUMBER, NOTHING = "gtin-"
"""The kinds of arguments: a tensor that takes a gradient, another one, an integer, another number, None."""

_registered: list[torch.library.Library] = []


class OneOperation(HandwrittenGradient):
    """A handwritten gradient that graphs of `torch.compile` call as one operation.

    Its arguments are tensors, numbers and None."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        name = f"{cls.__module__}.{cls.__qualname__}"
        FUNCTIONS[name] = cls
        # a function, as a compiler knows no attributes of such classes
        cls.name_in_graphs = staticmethod(lambda: name)  # type: ignore[method-assign]

    @staticmethod
    @abstractmethod
    def name_in_graphs() -> str:
        """The name by which graphs call it."""

    @classmethod
    @abstractmethod
    def empty_results(cls, *arguments: Any) -> list[Tensor]:
        """Tensors of the shapes and dtypes of all outputs, for tensors that have no numbers."""

    @classmethod
    def loops(cls, *arguments: Any) -> int | None:
        """How often it repeats what a compiler can trace: it is one operation if a graph is for any such number.

        None if it is always one."""
        return None

    @classmethod
    def in_graph(cls, *arguments: Any) -> Any:
        """The outputs of one operation, or of what a compiler traces where all loops have a fixed end."""
        loops = cls.loops(*arguments)
        if loops is None or is_compiled_for_any(loops):
            return _call(cls.name_in_graphs(), arguments)
        return cls.apply(*arguments)  # type: ignore[no-untyped-call]


def _call(name: str, arguments: Sequence[Any]) -> Any:
    """The results of the function with this name, in a graph of `torch.compile`."""
    _register()
    kinds = "".join([_kind(x) for x in arguments])
    results = torch.ops.manyformer.call_function(
        name,
        kinds,
        [x for x in arguments if isinstance(x, Tensor)],
        # a truth value is a number, but not for the schema
        [int(x) if isinstance(x, bool) else x for x, kind in zip(arguments, kinds) if kind == SIZE],
        [x for x, kind in zip(arguments, kinds) if kind == NUMBER],
    )
    return results[0] if len(results) == 1 else tuple(results)


def _kind(argument: Any) -> str:
    if argument is None:
        return NOTHING
    if isinstance(argument, Tensor):
        return DIFFERENTIATED if argument.requires_grad else TENSOR
    if isinstance(argument, float):
        return NUMBER
    return SIZE


class _Recorded:
    """Takes the place of the context of `forward` and `backward`."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Tensor | None, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep what `backward` reads."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Mark nothing: gradients of such results are not read."""

    def set_materialize_grads(self, value: bool) -> None:  # noqa: FBT001 - the signature is torch's
        """Set nothing: missing gradients are zeros here."""


def _arguments(kinds: str, tensors: Sequence[Tensor], sizes: Sequence[int], numbers: Sequence[float]) -> Iterator[Any]:
    """The arguments of the function in their order."""
    rest = {SIZE: iter(sizes), NUMBER: iter(numbers), TENSOR: iter(tensors)}
    for kind in kinds:
        if kind == NOTHING:
            yield None
        else:
            yield next(rest[TENSOR if kind == DIFFERENTIATED else kind])


def _run(name: str, kinds: str, *parts: Any) -> tuple[_Recorded, list[Tensor]]:
    """The context and the results of a forward pass, each result one piece of memory, as a graph expects it."""
    context = _Recorded(tuple(kind == DIFFERENTIATED for kind in kinds))
    results = FUNCTIONS[name].forward(context, *_arguments(kinds, *parts))
    if isinstance(results, Tensor):
        results = (results,)
    return context, [result.contiguous() for result in results]


def _forward(name: str, kinds: str, *parts: Any) -> list[Tensor]:
    _, results = _run(name, kinds, *parts)
    return results


def _empty_results(name: str, kinds: str, *parts: Any) -> list[Tensor]:
    return FUNCTIONS[name].empty_results(*_arguments(kinds, *parts))


def _differentiated(kinds: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    of_tensors = [kind for kind in kinds if kind in (DIFFERENTIATED, TENSOR)]
    return [x for x, kind in zip(tensors, of_tensors) if kind == DIFFERENTIATED]


def _backward(name: str, kinds: str, tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    """The gradients of all tensors that take one."""
    *parts, gradients_of_results = rest
    context, _ = _run(name, kinds, tensors, *parts)
    gradients = FUNCTIONS[name].backward(context, *gradients_of_results)
    if not isinstance(gradients, tuple):
        gradients = (gradients,)
    differentiated = [gradient for gradient, kind in zip(gradients, kinds) if kind == DIFFERENTIATED]
    return [
        torch.zeros_like(x, memory_format=torch.contiguous_format) if gradient is None else gradient.contiguous()
        for gradient, x in zip(differentiated, _differentiated(kinds, tensors))
    ]


def _empty_gradients(name: str, kinds: str, tensors: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in _differentiated(kinds, tensors)]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    name, kinds, tensors, *rest = inputs
    ctx.save_for_backward(*tensors)
    ctx.call = name, kinds, rest


def _gradient(ctx: Any, gradients_of_results: list[Tensor]) -> tuple[Any, ...]:
    name, kinds, rest = ctx.call
    gradients = iter(
        torch.ops.manyformer.differentiate_function(name, kinds, list(ctx.saved_tensors), *rest, gradients_of_results)
    )
    of_tensors = [kind for kind in kinds if kind in (DIFFERENTIATED, TENSOR)]
    of_list = [next(gradients) if kind == DIFFERENTIATED else None for kind in of_tensors]
    # for torch an empty list is one of tensors
    return None, None, of_list, *(None if numbers else [] for numbers in rest)


@constant_for_compiler
def _register() -> None:
    """Make the operations known to torch, at the first graph: it takes as long as the import of many modules."""
    if _registered:
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(f"call_function({ARGUMENTS}) -> Tensor[]")  # type: ignore[no-untyped-call]
    library.define(f"differentiate_function({ARGUMENTS}, Tensor[] gradients) -> Tensor[]")  # type: ignore[no-untyped-call]
    for operation, function, shapes in (
        ("call_function", _forward, _empty_results),
        ("differentiate_function", _backward, _empty_gradients),
    ):
        library.impl(operation, function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{NAMESPACE}::{operation}", shapes, lib=library)
    torch.library.register_autograd(f"{NAMESPACE}::call_function", _gradient, setup_context=_save_inputs, lib=library)
    _registered.append(library)
