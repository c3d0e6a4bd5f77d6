"""Tensors of the meta device, which have shapes alone, without the compiler that torch's own operators on it load.

Torch answers most operators on that device with Python written for its compiler: the first one imports the compiler
and sympy, which takes more than a second, and each takes as long as fifty operators of a CPU. What models are built
from and computed with is answered here from shapes, as torch would; what has no rule here is left to torch."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from manyformer.nn.runtime.torch_internals import TorchDispatchMode

ShapeRule = Callable[..., Any]
"""The answer of an operator for its arguments; NotImplemented where torch must give it."""

META = torch.device("meta")


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Models that are built in the block are on the meta device, without storage or numbers."""
    with META, ShapesAlone():
        yield


class ShapesAlone(TorchDispatchMode):
    """Answers operators on tensors of the meta device from their shapes; those of other devices are computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _rules:
            _rules[func] = _find_rule(func)
        rule = _rules[func]
        if rule is not None:
            answer = rule(*args, **kwargs)
            if answer is not NotImplemented:
                return answer
        return func(*args, **kwargs)


_rules: dict[Any, ShapeRule | None] = {}
"""The rules of operators that were met, None for those without one."""


def _find_rule(func: Any) -> ShapeRule | None:
    """The rule of an operator: by its name, or by torch's own tag of those that work element by element."""
    if func.namespace != "aten":
        return None
    name = func.overloadpacket.__name__
    overload = func._overloadname
    if (rule := _NAMED.get(f"{name}.{overload}")) is not None:
        return rule
    returns = [str(result.type) for result in func._schema.returns]
    if (torch.Tag.pointwise not in func.tags and name not in _UNTAGGED) or returns != ["Tensor"]:
        return None
    if name.endswith("_"):
        return _elementwise_in_place
    if overload.endswith("out"):
        return _elementwise_into
    if name in _COMPARISONS:
        return _compared
    if name in _OF_FIRST_DTYPE:
        return _elementwise_of_first_dtype
    return _elementwise_of_integers if name in _OF_INTEGERS else _elementwise


# ---- what rules have in common


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _dense(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _into(out: Tensor, shape: Sequence[int]) -> Any:
    """`out`, if it has the shape of the result: torch makes it another otherwise."""
    if tuple(out.shape) != tuple(shape) or not out.is_meta:
        return NotImplemented
    return out


# ---- initializers and other operators that change numbers alone


def _first_argument(x: Any, *_: Any, **__: Any) -> Any:
    if not _is_meta(x):
        return NotImplemented
    return x


# ---- element by element


_UNTAGGED = {"floor_divide", "softplus_backward"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "isnan", "isinf"}
_OF_FIRST_DTYPE = {"masked_fill"}
_OF_INTEGERS = {
    *("add", "sub", "rsub", "mul", "neg", "abs", "sign", "maximum", "minimum", "clamp", "clamp_min", "clamp_max"),
    *("remainder", "floor_divide", "where", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "relu"),
}
"""Element by element, these give integers for integers; others give floating-point numbers or are left to torch."""


def _elementwise(*args: Any, **options: Any) -> Any:
    dtype = _common_dtype(args)
    if dtype is None or not dtype.is_floating_point:
        return NotImplemented
    return _elementwise_of_integers(*args, **options)


def _elementwise_of_integers(*args: Any, **options: Any) -> Any:
    dtype = _common_dtype(args)
    if dtype is None or options.keys() & {"dtype", "memory_format"}:
        return NotImplemented
    return _of_elements(args, dtype)


def _elementwise_of_first_dtype(*args: Any, **_: Any) -> Any:
    return _of_elements(args, args[0].dtype)


def _compared(*args: Any, **_: Any) -> Any:
    return _of_elements(args, torch.bool)


def _common_dtype(args: Sequence[Any]) -> torch.dtype | None:
    """The dtype of the result; None where only torch knows it."""
    values = [arg for arg in args if isinstance(arg, Tensor | int | float | complex)]
    # the condition of a choice
    if len(values) == 3 and isinstance(values[0], Tensor) and values[0].dtype == torch.bool:
        values = values[1:]
    tensors = [value for value in values if isinstance(value, Tensor)]
    if any(tensor.is_complex() for tensor in tensors):
        return None
    if len(values) == 2 and tensors:
        return torch.result_type(values[0], values[1])
    if len({tensor.dtype for tensor in tensors}) != 1:
        return None
    dtype = tensors[0].dtype
    # numbers do not make integers of another kind
    if dtype.is_floating_point or all(isinstance(value, Tensor) or type(value) is int for value in values):
        return dtype
    return None


def _of_elements(args: Sequence[Any], dtype: torch.dtype) -> Any:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    shape = _broadcast(tensors)
    if shape is None:
        return NotImplemented
    if all(tensor.is_contiguous() for tensor in tensors):
        return _dense(shape, dtype)
    return _ordered(shape, _order_of(tensors, shape), dtype)


def _broadcast(tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """The shape of the result on the meta device; None where torch must say what is wrong or where it is."""
    if not any(tensor.is_meta for tensor in tensors) or any(t.ndim and not t.is_meta for t in tensors):
        return None
    first = tuple(tensors[0].shape)
    if all(tuple(tensor.shape) == first for tensor in tensors):
        return first
    ndim = max(tensor.ndim for tensor in tensors)
    shape = [1] * ndim
    for tensor in tensors:
        for place, size in enumerate(tensor.shape, ndim - tensor.ndim):
            if size != 1 and shape[place] not in (1, size):
                return None
            if size != 1:
                shape[place] = size
    return tuple(shape)


def _order_of(tensors: Sequence[Tensor], shape: Sequence[int]) -> list[int]:
    """The dimensions of a result from the innermost, as torch orders them by the strides of the operands."""
    ndim = len(shape)
    strides = []
    for tensor in tensors:
        sizes = [1] * (ndim - tensor.ndim) + list(tensor.shape)
        own_strides = [0] * (ndim - tensor.ndim) + list(tensor.stride())
        # a broadcast dimension says nothing
        strides.append([stride if size == full else 0 for size, full, stride in zip(sizes, shape, own_strides)])
    order = list(range(ndim))[::-1]
    # torch's insertion sort, which passes by what no operand tells
    for end in range(1, ndim):
        place = end
        for earlier in range(end - 1, -1, -1):
            verdict = _comparison(strides, shape, order[earlier], order[place])
            if verdict < 0:
                break
            if verdict > 0:
                order[earlier], order[place] = order[place], order[earlier]
                place = earlier
    return order


def _ordered(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A dense tensor with its dimensions in memory in this order, from the innermost."""
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(1, shape[dim])
    return torch.empty_strided(shape, strides, dtype=dtype, device=META)


def _comparison(strides: Sequence[Sequence[int]], shape: Sequence[int], inner: int, outer: int) -> int:
    """1 if the strides of `inner` are the greater, -1 if they are the less; 0 if no operand tells."""
    for of_operand in strides:
        if of_operand[inner] == 0 or of_operand[outer] == 0:
            continue
        if of_operand[inner] != of_operand[outer]:
            return 1 if of_operand[inner] > of_operand[outer] else -1
        if shape[inner] > shape[outer]:
            return 1
    return 0


def _elementwise_in_place(x: Any, *args: Any, **_: Any) -> Any:
    tensors = [x, *(arg for arg in args if isinstance(arg, Tensor))]
    if not _is_meta(x) or _broadcast(tensors) != tuple(x.shape):
        return NotImplemented
    return x


def _elementwise_into(*args: Any, out: Tensor, **_: Any) -> Any:
    shape = _broadcast([arg for arg in args if isinstance(arg, Tensor)])
    if shape is None:
        return NotImplemented
    return _into(out, shape)


# ---- new tensors


def _new(shape: Sequence[int], dtype: torch.dtype | None, options: dict[str, Any]) -> Any:
    device = options.get("device")
    if device is None or torch.device(device).type != "meta" or options.get("memory_format") is not None:
        return NotImplemented
    return _dense(shape, dtype or torch.get_default_dtype())


def _dtype_of(value: Any) -> torch.dtype | None:
    """The dtype of a new tensor of a value; None is the default."""
    if isinstance(value, bool):
        return torch.bool
    return torch.int64 if isinstance(value, int) else None


def _filled(shape: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    return _new(shape, dtype, options)


def _full(shape: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    return _new(shape, dtype or _dtype_of(value), options)


def _number(value: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    return _new((), dtype or torch.get_default_dtype(), options)


def _range(*bounds: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    start, end, step = 0, bounds[-1], 1
    if len(bounds) > 1:
        start, end = bounds[:2]
    if len(bounds) > 2:
        step = bounds[2]
    count = math.ceil((end - start) / step)
    if count < 0:
        return NotImplemented
    if dtype is None and all(isinstance(bound, int) for bound in bounds):
        dtype = torch.int64
    return _new((count,), dtype, options)


def _eye(rows: int, columns: int | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    return _new((rows, rows if columns is None else columns), dtype, options)


def _steps(start: Any, end: Any, steps: int, *_: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    return _new((steps,), dtype, options)


def _new_like(x: Tensor, shape: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **options: Any) -> Any:
    options["device"] = options.get("device") or x.device
    return _new(shape, dtype or x.dtype, options)


def _like(x: Tensor, *_: Any, dtype: torch.dtype | None = None, memory_format: Any = None, **options: Any) -> Any:
    if memory_format not in (None, torch.preserve_format, torch.contiguous_format):
        return NotImplemented
    like = _new_like(x, x.shape, dtype=dtype, **options)
    if like is NotImplemented or memory_format == torch.contiguous_format or x.is_contiguous():
        return like
    return _ordered(x.shape, _order_of([x], x.shape), like.dtype)


def _converted(x: Tensor, *, non_blocking: bool = False, **options: Any) -> Any:
    if not x.is_meta:
        return NotImplemented
    return _like(x, **options)


def _padded(x: Tensor, pad: Sequence[int], *_: Any) -> Any:
    if not x.is_meta or not x.is_contiguous():
        return NotImplemented
    shape = list(x.shape)
    # from the last dimension
    for place in range(len(pad) // 2):
        shape[-1 - place] += pad[2 * place] + pad[2 * place + 1]
    if min(shape, default=0) < 0:
        return NotImplemented
    return _dense(shape, x.dtype)


# ---- products


def _product(x: Tensor, y: Tensor, **options: Any) -> Any:
    # torch says what does not fit
    if x.shape[-1] != y.shape[int(x.ndim == 3)]:
        return NotImplemented
    return _result((x, y), (*x.shape[:-1], *y.shape[1 + (x.ndim == 3) :]), **options)


def _added_product(bias: Tensor, x: Tensor, y: Tensor, **options: Any) -> Any:
    if x.shape[-1] != y.shape[-2]:
        return NotImplemented
    options.pop("beta", None)
    options.pop("alpha", None)
    return _result((bias, x, y), (*x.shape[:-1], y.shape[-1]), **options)


def _result(tensors: Sequence[Tensor], shape: Sequence[int], *, out: Tensor | None = None, **options: Any) -> Any:
    if options or not all(tensor.is_meta for tensor in tensors) or len({tensor.dtype for tensor in tensors}) != 1:
        return NotImplemented
    if out is not None:
        return _into(out, shape)
    return _dense(shape, tensors[0].dtype)


# ---- over dimensions


def _reduced(x: Tensor, dims: Any = None, keepdim: int = 0, dtype: torch.dtype | None = None) -> Any:
    """The result over some dimensions, all if none are named."""
    if not x.is_meta:
        return NotImplemented
    places = {dims} if isinstance(dims, int) else set(dims or range(x.ndim))
    places = {place % max(1, x.ndim) for place in places}
    if keepdim:
        shape = [1 if place in places else size for place, size in enumerate(x.shape)]
    else:
        shape = [size for place, size in enumerate(x.shape) if place not in places]
    return _dense(shape, dtype or x.dtype)


def _summed(x: Tensor, dims: Any = None, keepdim: int = 0, *, dtype: torch.dtype | None = None) -> Any:
    # integers and truths are counted in 64 bits
    wide = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    return _reduced(x, dims, keepdim, dtype or wide)


def _reduced_numbers(
    x: Tensor,
    dims: Any = None,
    keepdim: int = 0,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    """Sums and means, which are integers of another size for integers."""
    if not x.is_floating_point():
        return NotImplemented
    return _reduced(x, dims, keepdim, dtype)


def _total(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced_numbers(x, dtype=dtype)


def _norm(x: Tensor, _: Any = 2, dims: Any = None, keepdim: int = 0, *, dtype: torch.dtype | None = None) -> Any:
    return _reduced_numbers(x, dims, keepdim, dtype=dtype)


def _tested(x: Tensor, dims: Any = None, keepdim: int = 0) -> Any:
    if x.dtype == torch.uint8:
        return NotImplemented
    return _reduced(x, dims, keepdim, torch.bool)


def _softmax(x: Tensor, _: int, dtype: Any = None, *, out: Tensor | None = None) -> Any:
    """Also `half_to_float`, which only GPUs have; others have a dtype in its place."""
    if not x.is_meta or dtype or not x.is_floating_point():
        return NotImplemented
    if out is not None:
        return _into(out, x.shape)
    return _dense(x.shape, x.dtype)


def _layer_norm(x: Tensor, shape: Sequence[int], *_: Any) -> Any:
    if not x.is_meta or x.dtype != torch.float32 or x.shape[-len(shape) :] != tuple(shape):
        return NotImplemented
    outer = (*x.shape[: x.ndim - len(shape)], *[1] * len(shape))
    return _dense(x.shape, x.dtype), _dense(outer, x.dtype), _dense(outer, x.dtype)


def _layer_norm_backward(_: Tensor, x: Tensor, *rest: Any) -> Any:
    """The gradients of the inputs, the weight and the bias, where they are wanted."""
    if not x.is_meta:
        return NotImplemented
    weight, bias, output_mask = rest[-3:]
    return tuple(_dense(y.shape, y.dtype) if wants else None for y, wants in zip((x, weight, bias), output_mask))


def _softmax_backward(gradient: Tensor, _: Tensor, __: int, dtype: torch.dtype) -> Any:
    if not gradient.is_meta:
        return NotImplemented
    return _dense(gradient.shape, dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> Any:
    """The fused kernel of CPUs: the result, and the logarithms of its sums for the backward pass."""
    if not q.is_meta:
        return NotImplemented
    rows, heads, length = q.shape[:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    return _like(q), _dense((rows, length, heads), wide).transpose(1, 2)


def _attention_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> Any:
    if not q.is_meta:
        return NotImplemented
    # its gradients lie in memory by rows, tokens, heads and channels
    return tuple(_ordered(x.shape, (3, 1, 2, 0), x.dtype) for x in (q, k, v))


def _log_sigmoid(x: Tensor) -> Any:
    """The result, and what the backward pass takes."""
    if not x.is_meta:
        return NotImplemented
    return _like(x), _like(x)


def _nll_loss(x: Tensor, targets: Tensor, _: Any, reduction: int, *__: Any) -> Any:
    """The loss, of each target if it is not reduced, and the sum of the weights of the targets."""
    if not x.is_meta:
        return NotImplemented
    return _dense(() if reduction else targets.shape, x.dtype), _dense((), x.dtype)


def _nll_loss_backward(_: Tensor, x: Tensor, *__: Any) -> Any:
    return _like(x) if x.is_meta else NotImplemented


def _rearranged(x: Tensor, *_: Any) -> Any:
    if not x.is_meta:
        return NotImplemented
    return _dense(x.shape, x.dtype)


def _accumulated(x: Tensor, *_: Any, dtype: torch.dtype | None = None) -> Any:
    if not x.is_floating_point() or dtype is not None:
        return NotImplemented
    return _rearranged(x)


# ---- selections


def _joined(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    ndim = tensors[0].ndim
    if not _are_alike(tensors) or any(tensor.ndim != ndim for tensor in tensors) or not ndim:
        return NotImplemented
    dim %= ndim
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    remaining_shapes = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    if len(remaining_shapes) != 1:
        return NotImplemented
    return _dense(shape, tensors[0].dtype)


def _stacked(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not _are_alike(tensors) or len({tuple(tensor.shape) for tensor in tensors}) != 1:
        return NotImplemented
    shape = list(tensors[0].shape)
    shape.insert(dim % (len(shape) + 1), len(tensors))
    return _dense(shape, tensors[0].dtype)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether the tensors can be joined into a contiguous one: that of images with channels last has that format."""
    has_images = all(tensor.ndim >= 4 and tensor.stride(1) == 1 and not tensor.is_contiguous() for tensor in tensors)
    is_plain = all(tensor.is_meta for tensor in tensors) and not has_images
    return is_plain and len({tensor.dtype for tensor in tensors}) == 1


def _rows(x: Tensor, dim: int, index: Tensor) -> Any:
    if not (x.is_meta and index.is_meta) or not x.ndim or index.ndim != 1:
        return NotImplemented
    shape = list(x.shape)
    shape[dim] = len(index)
    return _dense(shape, x.dtype)


def _gathered(x: Tensor, _: int, index: Tensor, **__: Any) -> Any:
    if not (x.is_meta and index.is_meta):
        return NotImplemented
    return _dense(index.shape, x.dtype)


def _embedded(weight: Tensor, ids: Tensor, *_: Any) -> Any:
    if not (weight.is_meta and ids.is_meta):
        return NotImplemented
    return _dense((*ids.shape, weight.shape[1]), weight.dtype)


def _repeated(x: Tensor, times: Sequence[int]) -> Any:
    if not x.is_meta:
        return NotImplemented
    shape = [1] * (len(times) - x.ndim) + list(x.shape)
    return _dense([size * count for size, count in zip(shape, times)], x.dtype)


def _indexed(x: Tensor, indices: Sequence[Tensor | None]) -> Any:
    """By integers, in neighboring dimensions of a contiguous tensor."""
    places = [place for place, index in enumerate(indices) if index is not None]
    numbers = [index for index in indices if index is not None]
    are_plain = all(index.is_meta and index.is_contiguous() and index.dtype == torch.int64 for index in numbers)
    are_neighbors = places == list(range(places[0], places[-1] + 1))
    shape = _broadcast(numbers)
    if not (x.is_meta and x.is_contiguous() and are_plain and are_neighbors) or shape is None:
        return NotImplemented
    return _dense((*x.shape[: places[0]], *shape, *x.shape[places[-1] + 1 :]), x.dtype)


def _part_backward(gradient: Tensor, shape: Sequence[int], *_: Any) -> Any:
    if not gradient.is_meta:
        return NotImplemented
    return _dense(shape, gradient.dtype)


def _embedding_backward(gradient: Tensor, _: Tensor, count: int, *__: Any) -> Any:
    if not gradient.is_meta:
        return NotImplemented
    return _dense((count, gradient.shape[-1]), gradient.dtype)


def _viewed(x: Tensor, shape: Sequence[int]) -> Any:
    if not x.is_meta:
        return NotImplemented
    return x.view(shape)


_NAMED: dict[str, ShapeRule] = {
    **dict.fromkeys(
        ("uniform_.default", "normal_.default", "zero_.default", "fill_.Scalar", "bernoulli_.float", "tril_.default"),
        _first_argument,
    ),
    **dict.fromkeys(
        ("exponential_.default", "random_.default", "triu_.default", "masked_fill_.Scalar"), _first_argument
    ),
    **dict.fromkeys(("zeros.default", "ones.default", "randn.default", "rand.default"), _filled),
    "full.default": _full,
    "scalar_tensor.default": _number,
    **dict.fromkeys(("arange.default", "arange.start", "arange.start_step"), _range),
    **dict.fromkeys(("eye.default", "eye.m"), _eye),
    **dict.fromkeys(("linspace.default", "logspace.default"), _steps),
    **dict.fromkeys(("new_empty.default", "new_zeros.default", "new_ones.default", "new_full.default"), _new_like),
    **dict.fromkeys(("empty_like.default", "zeros_like.default", "ones_like.default", "full_like.default"), _like),
    **dict.fromkeys(("clone.default", "_to_copy.default"), _converted),
    "constant_pad_nd.default": _padded,
    **dict.fromkeys(("mm.default", "mm.out", "bmm.default", "bmm.out", "mv.default"), _product),
    **dict.fromkeys(("addmm.default", "baddbmm.default", "baddbmm.out"), _added_product),
    "baddbmm_.default": _first_argument,
    **dict.fromkeys(("amax.default", "amin.default", "logsumexp.default"), _reduced),
    "mean.dim": _reduced_numbers,
    "sum.dim_IntList": _summed,
    "sum.default": lambda x, dtype=None: _summed(x, dtype=dtype),
    "mean.default": _total,
    "linalg_vector_norm.default": _norm,
    **dict.fromkeys(("any.dim", "all.dim"), _tested),
    **dict.fromkeys(("_softmax.default", "_log_softmax.default", "_safe_softmax.default", "softmax.int_out"), _softmax),
    "native_layer_norm.default": _layer_norm,
    "native_layer_norm_backward.default": _layer_norm_backward,
    **dict.fromkeys(("_softmax_backward_data.default", "_log_softmax_backward_data.default"), _softmax_backward),
    "_scaled_dot_product_flash_attention_for_cpu.default": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": _attention_backward,
    "log_sigmoid_forward.default": _log_sigmoid,
    "nll_loss_forward.default": _nll_loss,
    "nll_loss_backward.default": _nll_loss_backward,
    **dict.fromkeys(("tril.default", "triu.default"), _rearranged),
    "flip.default": lambda x, _: _like(x),
    "cumsum.default": _accumulated,
    "cat.default": _joined,
    "stack.default": _stacked,
    "index_select.default": _rows,
    "gather.default": _gathered,
    "index.Tensor": _indexed,
    "index_copy.default": _rearranged,
    **dict.fromkeys(("slice_backward.default", "select_backward.default"), _part_backward),
    "embedding.default": _embedded,
    "embedding_dense_backward.default": _embedding_backward,
    "repeat.default": _repeated,
    "_unsafe_view.default": _viewed,
}
