"""What the package needs of torch beyond its public interface, in one place, and what compilers cannot trace.

Each private name is looked for, and the package works without it. Such names move between releases of torch: nothing
else in the package may import them, so that a release that has moved one costs a function its speed or a check its
details, never the package its import.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, ParamSpec, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad as _forward_ad

# an underscore, but what torch's own pages tell extensions to use; every release from 2.0 on has them here
from torch.utils._python_dispatch import TorchDispatchMode as _TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

from manyformer.base.errors import UserError

__all__ = [
    "TorchDispatchMode",
    "attention_by_definition",
    "autocast_disabled",
    "autocast_dtype",
    "compile_backward_as_eager",
    "compile_up_to",
    "compiler_backend",
    "compiler_disabled",
    "constant_for_compiler",
    "count_blocks",
    "fixed_size",
    "has_autocast",
    "has_flash_attention_on_cpu",
    "has_hooks",
    "is_compiled_for_any",
    "is_of_any_size",
    "is_plain",
    "is_recorded",
    "is_traced",
    "is_transformed",
    "lacks_numbers",
    "narrowed",
    "overflow_of",
    "real_tensors",
    "refuse_any_size",
    "tensor_norms",
    "tensor_version",
    "tree_leaves",
    "tree_map",
    "tree_structure",
    "tree_unflatten",
    "weight_dtype",
]


P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M", bound=nn.Module)

PLAIN_TENSORS = (Tensor, nn.Parameter)
"""The types of weights that are numbers in memory: quantized and distributed ones are of other types."""


def compiler_disabled(function: Callable[P, T]) -> Callable[P, T]:
    """Make `torch.compile` break its graph at calls of `function`, as the decorator `torch.compiler.disable` does.

    That decorator imports the compiler, which takes seconds; this one imports nothing.
    """

    @functools.wraps(function)
    def call_uncompiled(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    # at functions with this attribute, a graph that is being traced ends
    call_uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
    call_uncompiled._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
    try:
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy
    except ImportError:
        # what the function calls may then be compiled, which is right and costs time
        return call_uncompiled
    # neither this frame nor those that it calls are compiled
    code: CodeType = call_uncompiled.__code__  # type: ignore[attr-defined]
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return call_uncompiled


class TorchDispatchMode(_TorchDispatchMode):  # type: ignore[no-untyped-call]
    """torch's class for what is done at every operator, whose own subclasses import the compiler at their first one."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        if "__torch_dispatch__" in vars(cls):
            cls.__torch_dispatch__ = compiler_disabled(vars(cls)["__torch_dispatch__"])  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch's way to do what `compiler_disabled` has done
        return False


def constant_for_compiler(function: Callable[P, T]) -> Callable[P, T]:
    """Make `torch.compile` call `function` while it traces and take the result for a constant of the graph.

    `torch.compiler.assume_constant_result` does the same, but imports the compiler, which takes seconds. Arguments must
    be constants too: numbers, strings, devices, tuples of them. Where a release does not know the mark, it traces what
    the function does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant_for_compiler
def has_autocast(device_type: str) -> bool:
    """Whether torch has autocast for this type of device; a question that the compiler of torch 2.11 cannot trace."""
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of products under autocast on `device`; None where it is off, or where a device (meta) has none."""
    if not has_autocast(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast_disabled(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context manager that disables autocast on `device`: long sums in half precision lose their later terms."""
    # nothing to disable is the usual case, in which a region costs more than the products of a small layer
    if autocast_dtype(device) is None:
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def attention_by_definition(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """`scaled_dot_product_attention` by products and a softmax, whatever kernels are allowed."""
    y, _ = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, **options)
    return y  # type: ignore[no-any-return]


def compiler_backend(name: str) -> Callable[..., Any] | None:
    """The backend of `torch.compile` with this name as a function of a graph and examples; None if torch hides it."""
    try:
        from torch._dynamo.backends.registry import lookup_backend
    except ImportError:
        return None
    backend: Callable[..., Any] = lookup_backend(name)
    return backend


def compile_up_to(variants: int) -> contextlib.AbstractContextManager[Any]:
    """Within it a function may be compiled for so many variants before torch gives up, which it does at 8 by default.

    Both limits of torch are meant: of one frame and of all its objects together."""
    try:
        import torch._dynamo.config as config
    except ImportError:
        return contextlib.nullcontext()
    limits = [name for name in ("recompile_limit", "accumulated_recompile_limit") if hasattr(config, name)]
    patched: contextlib.AbstractContextManager[Any] = config.patch(dict.fromkeys(limits, variants))
    return patched


def compile_backward_as_eager() -> None:
    """From now on compiled graphs trace gradients without autocast, as eager mode computes them; for the whole process.

    By default torch traces them under the autocast of the forward pass, and hand-written gradients, which have their
    precision from what they saved, then meet tensors of two. Compilation happens at later calls, hence no context."""
    try:
        import torch._functorch.config as config
    except ImportError:
        return
    if hasattr(config, "backward_pass_autocast"):
        config.backward_pass_autocast = "off"


def tensor_norms(tensors: Sequence[Tensor], order: float = 2.0) -> list[Tensor]:
    """The norm of each tensor, in one call for all of them where torch has it."""
    together = getattr(torch, "_foreach_norm", None)
    if together is None:
        return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]
    return list(together(list(tensors), order))


def tensor_version(tensor: Tensor) -> int | None:
    """A number that differs once the tensor has been written to; None where torch does not count."""
    if tensor.is_inference():
        return None
    return getattr(tensor, "_version", None)


def overflow_of(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> Tensor:
    """A number on the device, above 0 if a gradient was not finite when `scaler` divided those of `optimizer`.

    Where torch hides what the scaler has found, the gradients are looked at once more."""
    found = getattr(scaler, "_found_inf_per_device", None)
    if found is not None:
        return torch.stack([number.reshape(()) for number in found(optimizer).values()]).sum()
    weights = [weight for group in optimizer.param_groups for weight in group["params"] if weight.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(tensor_norms([weight.grad for weight in weights])))
    if hasattr(norm, "full_tensor"):
        whole: Tensor = norm.full_tensor()
    else:
        whole = norm
    return (~whole.isfinite()).float()


def has_flash_attention_on_cpu() -> bool:
    """Whether torch has its fused attention of a CPU, with log-sum-exps, as operators of their own."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, f"{name}_backward")


RECORDING_MODES = (torch._C._TorchDispatchModeKey.PROXY,)
"""Modes of `make_fx`, which would record the operations of a forward pass without their gradient."""

HIDING_MODES = (*RECORDING_MODES, torch._C._TorchDispatchModeKey.FAKE)
"""Modes in which tensors have no numbers."""


def is_transformed(modes: Sequence[Any] = RECORDING_MODES) -> bool:
    """Whether operations are differentiated forward, mapped over a batch (`torch.func`), or recorded to be run later.

    A handwritten gradient would then be lost or be wrong: what is computed must be operations of torch. `modes` are
    those of torch that count as well."""
    # a compiler knows such functions, and cannot trace the other questions
    if torch.compiler.is_compiling():
        return torch.compiler.is_exporting()
    if torch._C._len_torch_dispatch_stack() and _is_in_mode(modes):
        return True
    return (
        torch._C._are_functorch_transforms_active()
        or _forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def is_traced() -> bool:
    """Whether operations are recorded or transformed, so that the numbers of tensors are hidden or would become fixed.

    In graphs of `torch.compile`, `torch.export`, `make_fx` and `jit.trace`, in `torch.func`, and for fake tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    if torch._C._len_torch_dispatch_stack():
        return _is_in_mode(HIDING_MODES)
    return torch._C._get_tracing_state() is not None


def _is_in_mode(modes: Sequence[Any]) -> bool:
    return any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)


def fixed_size(size: int) -> int:
    """A size as a number, also where `torch.jit.trace` records sizes as tensors."""
    return int(size) if torch.jit.is_tracing() else size  # type: ignore[attr-defined,no-untyped-call]


def is_of_any_size(size: Any) -> bool:
    """Whether an exported graph is recorded that knows no number for this size."""
    return torch.compiler.is_exporting() and isinstance(size, torch.SymInt)


def count_blocks(length: int, size: int) -> int:
    """How many blocks of `size` hold `length` tokens.

    By a quotient of positive numbers: ONNX rounds that of a negative one, as in `-(-length // size)`, up."""
    return (length + size - 1) // size


def narrowed(x: Tensor, axis: int, start: int, size: int) -> Tensor:
    """`x.narrow(axis, start, size)`: a view, and a copy in an exported graph of any size.

    Whether the view is contiguous depends on whether it is all of `x`, and a graph is for one answer alone."""
    if is_of_any_size(size):
        return x.index_select(axis, torch.arange(start, start + size, device=x.device))
    return x.narrow(axis, start, size)


def refuse_any_size(size: Any, what: str) -> None:
    """Raise UserError for `is_of_any_size`: `what` is computed in a number of steps that an exported graph fixes."""
    if is_of_any_size(size):
        raise UserError(
            f"{what}, of which an exported graph has one number: export it with a fixed length (no dynamic dimension "
            "but the batch)"
        )


def is_compiled_for_any(size: int) -> bool:
    """Whether a graph of `torch.compile` is traced in which this size may be any number, such as a marked length."""
    if not torch.compiler.is_dynamo_compiling():
        return False
    try:
        from torch.fx.experimental.symbolic_shapes import has_static_value
    except ImportError:
        # then sizes are numbers, and a graph is traced for each of them
        return False
    return not has_static_value(size)


def lacks_numbers(x: Tensor) -> bool:
    """Whether `x` stands for the tensors of many calls, under `vmap`, or has a shape alone."""
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_batchedtensor(x):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def real_tensors() -> contextlib.AbstractContextManager[Any]:
    """Within it tensors of the host have numbers, also where a mode makes tensors without them."""
    modes: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return modes


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks of its calls are registered, so that the module must be called as a module."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def is_recorded() -> bool:
    """Whether a call becomes a graph of another engine, by `torch.export` or `torch.jit.trace`."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]


def is_plain(module: nn.Module | None, kind: type[M]) -> TypeGuard[M]:
    """Whether the module computes what its class `kind` says and nothing else, so that its weights may be read.

    Adapters and quantization put a module of another class in its place, parametrizations give it a class of its own,
    pruning adds a hook, and other tools a `forward` of the object or weights of another type. All of these act when
    the module is called: a form that reads its weights instead is taken where nothing of them is there."""
    if type(module) is not kind or has_hooks(module) or "forward" in module.__dict__:
        return False
    # a loop: it is asked of every module before the first token
    for weight in module._parameters.values():  # noqa: SIM110
        if weight is not None and type(weight) not in PLAIN_TENSORS:
            return False
    return True


def weight_dtype(module: nn.Module) -> torch.dtype:
    """The dtype of the inputs that a module expects: that of its weights, and torch's default where it packs them."""
    dtypes = (weight.dtype for weight in module.parameters() if weight.is_floating_point())
    return next(dtypes, torch.get_default_dtype())
