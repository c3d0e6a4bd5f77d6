"""A record of the operations of a forward pass, along which relevance moves back from outputs to inputs."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from manyformer.errors import UserError
from manyformer.relevance.attention_rule import attention_relevance
from manyformer.relevance.propagation_rules import linear_relevance, pooled_relevance, term_relevance
from manyformer.torch_internals import tree_leaves

Propagate = Callable[[Sequence[Tensor]], Sequence[Tensor]]
"""From the relevance of all outputs of an operation to that of all of its inputs that depend on the embeddings."""

ACTIVATIONS = frozenset({"relu", "gelu", "silu", "tanh", "sigmoid", "softplus", "elu", "leaky_relu"})
"""Elementwise functions, whose outputs pass on their relevance unchanged."""

NORMS = frozenset({"layer_norm", "rms_norm"})

MOVES = frozenset(
    [
        *("view", "reshape", "transpose", "permute", "flatten", "unflatten", "contiguous", "expand", "__getitem__"),
        *("split", "split_with_sizes", "chunk", "unbind", "squeeze", "unsqueeze", "cat", "stack", "to", "float"),
        *("double", "narrow", "select", "movedim", "index_select", "clone", "mT", "T", "view_as", "pad", "flip"),
    ]
)
"""Operations whose outputs are elements of their inputs, which take the relevance along."""


CREATIONS = frozenset({"new_zeros", "new_empty", "new_ones", "new_full", "zeros_like", "ones_like", "empty_like"})
"""Functions whose result has only the shape or type of their argument."""


class RecordedOperation(NamedTuple):
    """An operation: its inputs that depend on the embeddings, its outputs, and its rule."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    propagate: Propagate


class RelevanceTape(TorchFunctionMode):
    """Records every operation on a tensor that depends on a tracked one; no gradients are needed.

    Raises UserError for an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self._tracked: dict[int, Tensor] = {}
        self._operations: list[RecordedOperation] = []
        self._is_paused = False

    def track(self, tensor: Tensor) -> None:
        """Record operations on `tensor`, and on what is computed from it."""
        self._tracked[id(tensor)] = tensor

    def is_tracked(self, tensor: Tensor) -> bool:
        """Whether `tensor` depends on a tracked one."""
        return id(tensor) in self._tracked

    def record(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], propagate: Propagate) -> None:
        """Record an operation, or several as one, with its rule."""
        self._operations.append(RecordedOperation(inputs, outputs, propagate))
        for output in outputs:
            self.track(output)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record no operation inside the block, which `record` stands for."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._is_paused:
            return result
        inputs = tuple(x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and id(x) in self._tracked)
        outputs = tuple(x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point())
        if inputs and outputs and outputs[0] is not inputs[0] and _operation_name(func) not in CREATIONS:
            self.record(inputs, outputs, _rule(func, args, kwargs, inputs, outputs[0]))
        return result

    @torch.no_grad()
    def propagate(self, output: Tensor, relevance: Tensor) -> dict[int, Tensor]:
        """Move the relevance (t, *shape) of `output` back; that of all tracked tensors, by the id of the tensor."""
        relevances = {id(output): relevance}
        for inputs, outputs, propagate in reversed(self._operations):
            if not any(id(x) in relevances for x in outputs):
                continue
            received = [relevances.get(id(x), x.new_zeros(len(relevance), *x.shape)) for x in outputs]
            for x, part in zip(inputs, propagate(received), strict=True):
                # streams of reversible layers are wider than their branches
                if id(x) in relevances:
                    relevances[id(x)] = relevances[id(x)] + part
                else:
                    relevances[id(x)] = part.to(x.dtype)
        return relevances


def _rule(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: tuple[Tensor, ...], result: Tensor
) -> Propagate:
    """The rule of an operation. Raises UserError if it has none."""
    name = _operation_name(func)
    if name == "linear" and len(inputs) == 1:
        weight, offset = [*args[1:], None][:2] if len(args) > 1 else (kwargs["weight"], kwargs.get("bias"))
        offset = kwargs.get("bias", offset)
        return lambda relevances: [linear_relevance(relevances[0], inputs[0], weight, offset)]
    if name in NORMS:
        return _norm_rule(func, args, kwargs)
    if name in ACTIVATIONS:
        return lambda relevances: relevances
    # zeros that take the place of elements have no relevance
    if name in MOVES or (name == "masked_fill" and args[-1] == 0):
        return _move_rule(func, args, kwargs, inputs)
    if name == "add" and not kwargs:
        return _sum_rule(args, inputs, result)
    if name in ("mul", "div", "truediv") and not kwargs and inputs[0] is args[0]:
        return _product_rule(name, result, inputs)
    if name in ("sum", "mean") and inputs[0].ndim == 3 and (*args[1:], *kwargs.values()) == (1,):
        if name == "sum":
            terms = inputs[0]
        else:
            terms = inputs[0] / inputs[0].shape[1]
        return lambda relevances: [pooled_relevance(relevances[0], terms)]
    if name == "scaled_dot_product_attention":
        return _attention_rule(args, kwargs, inputs)
    raise UserError(f"relevance has no rule for the operation {name}, which this model computes")


def _operation_name(func: Any) -> str:
    name: str = getattr(func, "__name__", str(func))
    # the getter of a property, such as x.mT
    if name == "__get__":
        return str(func.__self__.__name__)
    return name


def _norm_rule(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Propagate:
    x, *others = args

    def normalize(row: Tensor) -> Tensor:
        normalized: Tensor = func(row, *others, **kwargs)
        return normalized

    def propagate(relevances: Sequence[Tensor]) -> list[Tensor]:
        rows = x.reshape(-1, x.shape[-1])
        jacobians = torch.func.vmap(torch.func.jacrev(normalize), chunk_size=64)(rows)
        offset = normalize(torch.zeros_like(rows[0]))
        jacobian = jacobians.view(*x.shape, x.shape[-1])
        return [linear_relevance(relevances[0], x, jacobian, offset)]

    return propagate


def _move_rule(func: Any, args: Sequence[Any], kwargs: dict[str, Any], inputs: tuple[Tensor, ...]) -> Propagate:
    """The transpose of the operation, by its gradient."""

    def move(*tensors: Tensor) -> tuple[Tensor, ...]:
        substitutes = dict(zip(map(id, inputs), tensors, strict=True))

        def substitute(value: Any) -> Any:
            if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
                return type(value)(substitute(part) for part in value)
            return substitutes.get(id(value), value)

        moved = func(*map(substitute, args), **{key: substitute(value) for key, value in kwargs.items()})
        return tuple(x for x in tree_leaves(moved) if isinstance(x, Tensor))

    def propagate(relevances: Sequence[Tensor]) -> list[Tensor]:
        transpose: Callable[..., tuple[Tensor, ...]] = torch.func.vjp(move, *inputs)[1]
        parts: list[tuple[Tensor, ...]] = [
            transpose(tuple(relevance[target] for relevance in relevances)) for target in range(len(relevances[0]))
        ]
        return [torch.stack(tensors) for tensors in zip(*parts)]

    return propagate


def _sum_rule(args: Sequence[Any], inputs: tuple[Tensor, ...], result: Tensor) -> Propagate:
    if len(inputs) == 2 and inputs[0].shape == inputs[1].shape:
        return lambda relevances: term_relevance(relevances[0], list(inputs))
    constant = next((x for x in args if isinstance(x, Tensor) and x is not inputs[0]), None)
    if len(inputs) == 2 or constant is None or result.shape != inputs[0].shape:
        raise UserError("relevance has no rule for the sum of tensors of different shapes, which this model computes")
    offset = constant.expand(result.shape)
    identity = torch.eye(offset.shape[-1], dtype=offset.dtype, device=offset.device)
    return lambda relevances: [linear_relevance(relevances[0], inputs[0], identity, offset)]


def _product_rule(name: str, result: Tensor, inputs: tuple[Tensor, ...]) -> Propagate:
    """For a product of equal shapes each factor has the product as its impact; a constant factor may be broadcast."""
    if (len(inputs) == 2 and name != "mul") or any(x.shape != result.shape for x in inputs):
        raise UserError("relevance has no rule for a quotient, or a product of different shapes, which this model has")
    return lambda relevances: term_relevance(relevances[0], [result] * len(inputs))


def _attention_rule(args: Sequence[Any], kwargs: dict[str, Any], inputs: tuple[Tensor, ...]) -> Propagate:
    q, k, v, *rest = args
    mask = kwargs.get("attn_mask", rest[0] if rest else None)
    bias = mask
    if mask is not None and mask.dtype == torch.bool:
        bias = q.new_zeros(mask.shape).masked_fill(~mask, -torch.inf)
    if kwargs.get("is_causal"):
        bias = q.new_full((1, 1, q.shape[2], k.shape[2]), -torch.inf).triu(1)
    scale = kwargs.get("scale")
    groups = q.shape[1] // k.shape[1]

    def propagate(relevances: Sequence[Tensor]) -> list[Tensor]:
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if scale is None:
            used_scale = 1 / math.sqrt(q.shape[-1])
        else:
            used_scale = scale
        q_part, *shared = attention_relevance(relevances[0], q, keys, values, bias, scale=used_scale)
        parts = [q_part, *(torch.unflatten(part, 2, (-1, groups)).sum(3) for part in shared)]
        return [part for x, part in zip((q, k, v), parts) if any(x is tracked for tracked in inputs)]

    return propagate
