"""How relevance moves from the outputs of a forward pass to its inputs: the rule of each operation, and their record.

Voita et al. (2019, section 4), with the details of the authors' code. With the Jacobian J of y = f(x_1 .. x_k) at x,
the impact of input i on output o is z[o, i] = J[o, i] x[i] + f(0)[o] / n, where n counts the inputs of all arguments of
one sample. Input i gets sum_o R[o] (max(z, 0) / (sum_i max(z, 0) + eps) + min(z, 0) / (sum_i min(z, 0) - eps)) / 2,
scaled so that the absolute relevance of a sample stays the same. Each token is a sample, except in attention. Relevance
has an axis `t` of targets before those of the tensor that it belongs to: several predictions are explained at once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.overrides import TorchFunctionMode

from manyformer.base.errors import UserError
from manyformer.nn.runtime.torch_internals import tree_leaves

EPSILON = 1e-5
"""Added to the sums of impacts, as in the authors' code."""

MAX_IMPACTS = 1 << 22
"""The largest number of impacts that are computed at a time."""

Relevance = Float[Tensor, "t *shape"]

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


def rescaled(relevances: list[Tensor], reference: Tensor, sample_dims: int) -> list[Tensor]:
    """Relevances of the arguments with the sum of absolute values of `reference`, in each sample.

    The last `sample_dims` axes are those within a sample; the relevance of a sample that has none stays zero."""
    axes = tuple(range(-sample_dims, 0))
    # rules lose or create relevance; here each sample gets back exactly what it received
    total = sum(relevance.abs().sum(axes, keepdim=True) for relevance in relevances)
    assert isinstance(total, Tensor)
    scale = reference.abs().sum(axes, keepdim=True) / total.clamp(min=torch.finfo(total.dtype).tiny)
    return [relevance * scale for relevance in relevances]


def linear_relevance(
    relevance: Float[Tensor, "t *b o"],
    x: Float[Tensor, "*b i"],
    jacobian: Float[Tensor, "o i"] | Float[Tensor, "*b o i"],
    offset: Float[Tensor, " o"] | Float[Tensor, "*b o"] | None,
) -> Float[Tensor, "t *b i"]:
    """The relevance of inputs of a map with this Jacobian at each token and the value `offset` at 0, or 0 for None.

    Impacts are computed for a few tokens at a time, and only for outputs that have any relevance."""
    flat = relevance.reshape(relevance.shape[0], -1, relevance.shape[-1])
    inputs = x.reshape(-1, x.shape[-1])
    jacobians = jacobian.expand(*x.shape[:-1], *jacobian.shape[-2:]).reshape(-1, *jacobian.shape[-2:])
    if jacobian.ndim == 2:
        # a view, because a copy for each token would not fit
        jacobians = jacobian.expand(len(inputs), *jacobian.shape)
    offsets = None
    if offset is not None:
        offsets = offset.expand(*x.shape[:-1], -1).reshape(-1, offset.shape[-1])
    # of a vocabulary only one logit of a prediction has relevance
    active_outputs = flat.ne(0).flatten(0, 1).any(0).nonzero()[:, 0]
    active_tokens = flat.ne(0).any(-1).any(0).nonzero()[:, 0]
    result = relevance.new_zeros(*flat.shape[:2], inputs.shape[-1])
    size = max(1, MAX_IMPACTS // max(1, len(active_outputs) * inputs.shape[-1]))
    for tokens in torch.split(active_tokens, size):
        impacts = jacobians[tokens[:, None], active_outputs] * inputs[tokens, None]
        if offsets is not None:
            impacts = impacts + offsets[tokens[:, None], active_outputs, None] / inputs.shape[-1]
        outputs = flat[:, tokens][..., active_outputs].transpose(0, 1)
        result[:, tokens] = _distribute(outputs, impacts).transpose(0, 1)
    [scaled] = rescaled([result], flat, 1)
    return scaled.view(relevance.shape[0], *x.shape)


def _distribute(relevance: Float[Tensor, "p t o"], impacts: Float[Tensor, "p o i"]) -> Float[Tensor, "p t i"]:
    """Relevance by the shares of the positive and of the negative impacts, half of it each."""
    positive = impacts.clamp(min=0)
    negative = impacts - positive
    by_positive = relevance / (positive.sum(-1)[:, None] + EPSILON)
    by_negative = relevance / (negative.sum(-1)[:, None] - EPSILON)
    return (by_positive @ positive + by_negative @ negative) / 2


def term_relevance(relevance: Float[Tensor, "t *b d"], impacts: list[Float[Tensor, "*b d"]]) -> list[Tensor]:
    """The relevance of arguments of which each output depends on one element each, with these impacts."""
    positive, negative = ([impact.clamp(*limits) for impact in impacts] for limits in ((0, None), (None, 0)))
    by_positive = relevance / (torch.stack(positive).sum(0) + EPSILON) / 2
    by_negative = relevance / (torch.stack(negative).sum(0) - EPSILON) / 2
    shares = [by_positive * above + by_negative * below for above, below in zip(positive, negative)]
    return rescaled(shares, relevance, 1)


def pooled_relevance(relevance: Float[Tensor, "t b d"], x: Float[Tensor, "b s d"]) -> Float[Tensor, "t b s d"]:
    """The relevance of the terms of a sum over all tokens of a row, which is one sample."""
    above = x.clamp(min=0)
    below = x.clamp(max=0)
    by_positive = relevance / (above.sum(1) + EPSILON) / 2
    by_negative = relevance / (below.sum(1) - EPSILON) / 2
    shares = by_positive[:, :, None] * above + by_negative[:, :, None] * below
    [scaled] = rescaled([shares], relevance[:, :, None], 2)
    return scaled


def attention_relevance(
    relevance: Float[Tensor, "t b h l f"],
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b h s e"],
    v: Float[Tensor, "b h s f"],
    bias: Float[Tensor, "#b #h l s"] | None,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The relevance of queries, keys and values of softmax(q k^T scale + bias) v; a sample is one head of one row.

    The impacts of the values are a[l, s] v[s, f], those of the keys a[l, s] (v[s, f] - y[l, f]) q[l, e] k[s, e] scale,
    and those of the queries their sums over s, with weights a and outputs y. The impacts of the keys are products of a
    part without e and a part without f, so that sums of their positive and negative parts need no Jacobian. A few
    queries are processed at a time: memory is linear in the number of keys. Rows without a visible key get nothing."""
    totals = [relevance.new_zeros(relevance.shape[0], *x.shape) for x in (q, k, v)]
    elements_per_query = k.shape[2] * v.shape[3] * q.shape[0] * q.shape[1]
    size = max(1, MAX_IMPACTS // max(1, elements_per_query))
    for start in range(0, q.shape[2], size):
        queries = slice(start, start + size)
        part_bias = bias if bias is None else bias[:, :, queries]
        parts = _query_relevance(relevance[:, :, :, queries], q[:, :, queries], k, v, part_bias, scale)
        totals[0][:, :, :, queries] = parts[0]
        totals[1] += parts[1]
        totals[2] += parts[2]
    # the samples are whole heads of a row, whose queries or keys are counted together
    q_relevance, k_relevance, v_relevance = rescaled(totals, relevance, 2)
    return q_relevance, k_relevance, v_relevance


def _query_relevance(
    relevance: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The unscaled relevance that comes from these queries alone."""
    scores = q @ k.mT * scale
    weights = (scores if bias is None else scores + bias).softmax(-1).nan_to_num(0.0)
    # the derivative of a softmax-weighted mean by a score is the weight times this
    deviations = v[:, :, None] - (weights @ v)[:, :, :, None]
    # a (v - y), split by sign: (b h l s f)
    effects = weights[..., None] * deviations
    effects_above = effects.clamp(min=0)
    effects_below = effects.clamp(max=0)
    (q_above, q_below), (k_above, k_below) = ((x.clamp(min=0), x.clamp(max=0)) for x in (q, k))
    # the sums over e of the positive and of the negative products q k scale: (b h l s)
    products_above = (q_above @ k_above.mT + q_below @ k_below.mT) * scale
    products_below = (q_above @ k_below.mT + q_below @ k_above.mT) * scale
    query_impacts = q[..., None, :] * torch.einsum("bhlsf,bhse->bhlfe", effects, k) * scale
    queries_above = query_impacts.clamp(min=0)
    queries_below = query_impacts.clamp(max=0)
    sums = []
    for sign, first, second, query_part in (
        (1, products_above, products_below, queries_above),
        (-1, products_below, products_above, queries_below),
    ):
        key_sum = torch.einsum("bhlsf,bhls->bhlf", effects_above, first)
        key_sum += torch.einsum("bhlsf,bhls->bhlf", effects_below, second)
        value_sum = weights @ (v.clamp(min=0) if sign > 0 else v.clamp(max=0))
        sums.append(key_sum + value_sum + query_part.sum(-1) + sign * EPSILON)
    above, below = (relevance / total / 2 for total in sums)
    q_relevance = torch.einsum("tbhlf,bhlfe->tbhle", above, queries_above)
    q_relevance += torch.einsum("tbhlf,bhlfe->tbhle", below, queries_below)
    # for keys, positive products q k meet positive effects in the positive part, and negative ones in the negative part
    with_above = torch.einsum("tbhlf,bhlsf->tbhls", above, effects_above)
    with_above += torch.einsum("tbhlf,bhlsf->tbhls", below, effects_below)
    with_below = torch.einsum("tbhlf,bhlsf->tbhls", above, effects_below)
    with_below += torch.einsum("tbhlf,bhlsf->tbhls", below, effects_above)
    same_sign = k_above * (with_above.mT @ q_above) + k_below * (with_above.mT @ q_below)
    other_sign = k_below * (with_below.mT @ q_above) + k_above * (with_below.mT @ q_below)
    v_relevance = v.clamp(min=0) * (weights.mT @ above) + v.clamp(max=0) * (weights.mT @ below)
    return q_relevance, (same_sign + other_sign) * scale, v_relevance


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
        # the tensor is kept, so that its id is not given to another one
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
        # calls that return their argument, such as `contiguous`, move nothing
        if inputs and outputs and outputs[0] is not inputs[0] and _operation_name(func) not in CREATIONS:
            self.record(inputs, outputs, _rule(func, args, kwargs, inputs, outputs[0]))
        return result

    @torch.no_grad()
    def propagate(self, output: Tensor, relevance: Tensor) -> dict[int, Tensor]:
        """Move the relevance (t, *shape) of `output` back; that of all tracked tensors, by the id of the tensor."""
        relevances = {id(output): relevance}
        for operation in reversed(self._operations):
            if not any(id(x) in relevances for x in operation.outputs):
                continue
            # outputs that nobody used have no relevance
            received = [relevances.get(id(x), x.new_zeros(len(relevance), *x.shape)) for x in operation.outputs]
            for x, part in zip(operation.inputs, operation.propagate(received), strict=True):
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
        # each argument by position or by name
        arguments = dict(zip(("input", "weight", "bias"), args)) | kwargs
        weight = arguments["weight"]
        offset = arguments.get("bias")
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
    x, *arguments = args

    def normalize(row: Tensor) -> Tensor:
        normalized: Tensor = func(row, *arguments, **kwargs)
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
    arguments = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args)) | kwargs
    q = arguments["query"]
    k = arguments["key"]
    v = arguments["value"]
    bias = arguments.get("attn_mask")
    if bias is not None and bias.dtype == torch.bool:
        bias = q.new_zeros(bias.shape).masked_fill(~bias, -torch.inf)
    if arguments.get("is_causal"):
        bias = q.new_full((1, 1, q.shape[2], k.shape[2]), -torch.inf).triu(1)
    scale = arguments.get("scale")
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1])
    groups = q.shape[1] // k.shape[1]

    def propagate(relevances: Sequence[Tensor]) -> list[Tensor]:
        # heads that share keys and values each give them relevance, which is added up
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        q_part, *shared = attention_relevance(relevances[0], q, keys, values, bias, scale=scale)
        parts = [q_part, *(torch.unflatten(part, 2, (-1, groups)).sum(3) for part in shared)]
        return [part for x, part in zip((q, k, v), parts) if any(x is tracked for tracked in inputs)]

    return propagate
