"""A device that is not there: tensors that compute on the CPU, say that they are on `mps`, and lack what it lacks.

No tensor of the device is of float64, and operators that torch does not implement there raise what torch raises. Which
these are is read from the table of operators that torch is built from. Tensors of the CPU are mixed with those of the
device without a word."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import resources
from typing import Any, Self, TypeVar
from unittest.mock import patch

import torch
import yaml
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MPS = torch.device("mps", 0)
MISSING_TYPES = (torch.float64, torch.complex128)
ModelT = TypeVar("ModelT", bound=nn.Module)
FALLBACKS = ("CompositeImplicit", "CompositeExplicit")
COPIES = ("_to_copy", "copy_", "copy")
COUNTERPARTS = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_attention_math_for_mps",
    "mkldnn_rnn_layer": "_lstm_mps",
    "mkldnn_rnn_layer_backward": "lstm_mps_backward",
}
"""Operators that torch chooses in C++ for what computes on the CPU, and those that it chooses on MPS."""


@functools.cache
def implemented_operators() -> frozenset[str]:
    """The names, such as `aten::add.Tensor`, of the operators that torch implements on MPS or in terms of others."""
    table = resources.files("torchgen") / "packaged" / "ATen" / "native" / "native_functions.yaml"
    entries = yaml.safe_load(table.read_text(encoding="utf-8"))
    dispatch = {entry["func"].partition("(")[0]: entry for entry in entries}

    def is_implemented(entry: Mapping[str, Any]) -> bool:
        if delegate := entry.get("structured_delegate"):
            return is_implemented(dispatch[delegate])
        if "dispatch" not in entry:
            # without a table an operator consists of others
            return True
        keys = [key.strip() for keys in entry["dispatch"] for key in keys.split(",")]
        return "MPS" in keys or any(key.startswith(FALLBACKS) for key in keys)

    return frozenset(f"aten::{name}" for name, entry in dispatch.items() if is_implemented(entry))


class OnMps(Tensor):
    """A tensor of the device; `computed` is the one that holds its numbers."""

    computed: Tensor

    @staticmethod
    def __new__(cls, computed: Tensor) -> Self:
        if computed.dtype in MISSING_TYPES:
            name = str(computed.dtype).removeprefix("torch.")
            raise TypeError(
                f"Cannot convert a MPS Tensor to {name} dtype as the MPS framework doesn't support {name}. Please use "
                "float32 instead."
            )
        wrapper = Tensor._make_wrapper_subclass(
            cls,
            computed.size(),
            strides=computed.stride(),
            storage_offset=computed.storage_offset(),
            dtype=computed.dtype,
            layout=computed.layout,
            device="cpu",
        )
        wrapper.computed = computed
        return wrapper

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    @property
    def is_mps(self) -> bool:  # type: ignore[override]
        return True

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnMps({self.computed})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copied = OnMps(self.computed.clone())
        return nn.Parameter(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("tolist", "numpy", "untyped_storage", "data_ptr"):
                return getattr(args[0].computed, name)()
            if name == "cpu":
                return ToHost.apply(args[0])
            if name == "to":
                place, args, kwargs = split_place(args, kwargs)
                moved = func(*args, **kwargs) if len(args) > 1 or kwargs else args[0]
                return ToHost.apply(moved) if place == "cpu" else moved
            if name in ("pin_memory", "is_pinned"):
                raise AssertionError("memory of this device cannot be pinned")
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def split_place(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str | None, list[Any], dict[str, Any]]:
    """The type of device that the arguments of `to` name, if any, and the other arguments."""
    place, others, rest = None, [args[0]], dict(kwargs)
    for value in (*args[1:], *([rest.pop("device")] if "device" in rest else [])):
        if isinstance(value, Tensor):
            place, rest["dtype"] = value.device.type, value.dtype
        elif isinstance(value, str | torch.device):
            place = torch.device(value).type
        elif value is not None:
            others.append(value)
    return place, others, rest


class ToHost(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.computed.clone() if isinstance(x, OnMps) else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return as_mps(grads[0])


class ToMps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return OnMps(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].computed if isinstance(grads[0], OnMps) else grads[0]


def as_mps(x: Tensor) -> Tensor:
    return x if isinstance(x, OnMps) else OnMps(x)


def to_mps(x: Tensor) -> Tensor:
    """A copy of a tensor on the device."""
    if isinstance(x, OnMps):
        return x
    needs_gradient = x.requires_grad and torch.is_grad_enabled()
    return ToMps.apply(x) if needs_gradient else OnMps(x.detach().clone())  # type: ignore[no-untyped-call,no-any-return]


REFUSED: set[str] = set()
"""The operators that were refused since the device was pretended."""


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operator on the CPU; its results are on the device if an argument is, or if it is asked for."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device, name = kwargs.get("device"), func._schema.name.partition("::")[2]
    on_device = any(isinstance(tensor, OnMps) for tensor in tensors)
    if device is not None and torch.device(device).type == "mps":
        on_device = True
    if func is torch.ops.aten.copy_.default:
        on_device = isinstance(args[0], OnMps)
    if on_device and name not in COPIES:
        refuse_unimplemented(func)
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    originals = {id(tensor.computed): tensor for tensor in tensors if isinstance(tensor, OnMps)}
    args, kwargs = tree_map(lambda leaf: leaf.computed if isinstance(leaf, OnMps) else leaf, (args, kwargs))
    if name in ("_conj", "_neg_view"):
        # the lazy bit of these views would be lost with the wrapper
        result = (torch.ops.aten.conj_physical if name == "_conj" else torch.ops.aten.neg).default(*args)
    else:
        result = func(*args, **kwargs)

    if name == "_pack_padded_sequence":
        # the sizes of its batches stay on the CPU
        return OnMps(result[0]), result[1]

    def wrap(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, OnMps) or not on_device:
            return leaf
        # what an operator changes in place is the very argument
        return originals.get(id(leaf)) if id(leaf) in originals else OnMps(leaf)

    return tree_map(wrap, result)


def refuse_unimplemented(func: Any) -> None:
    """Raise what torch raises for an operator without a kernel for MPS."""
    overload = func._schema.overload_name
    name = func._schema.name + (f".{overload}" if overload else "")
    if func.__name__.partition(".")[0] in COUNTERPARTS:
        name = f"aten::{COUNTERPARTS[func.__name__.partition('.')[0]]}"
    if func._schema.name.startswith("aten::") and name not in implemented_operators():
        REFUSED.add(name)
        raise NotImplementedError(
            f"The operator '{name}' is not currently implemented for the MPS device. If you want this op to be "
            "considered for addition please comment on https://github.com/pytorch/pytorch/issues/141287 and mention "
            "use-case, that resulted in missing op as well as commit hash. As a temporary fix, you can set the "
            "environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a fallback for this op."
        )


class Operators(TorchDispatchMode):
    """Makes tensors of the device where `device="mps"` asks for them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


class Calls(TorchFunctionMode):
    """What torch resolves before it calls an operator: `to`, `tensor` and functions that are given a device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "to" and not isinstance(args[0], OnMps):
            place, others, rest = split_place(args, kwargs)
            if place == "mps":
                if rest.pop("non_blocking", False):
                    raise AssertionError("copies to this device do not go on beside the computation")
                return to_mps(func(*others, **rest) if len(others) > 1 or rest else args[0])
        if name == "new_tensor" and isinstance(args[0], OnMps):
            return OnMps(torch.tensor(args[1], dtype=kwargs.get("dtype", args[0].dtype)))
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "mps" and name != "to":
            if name in ("as_tensor", "asarray") and isinstance(args[0], OnMps):
                return args[0]
            # an operator of the CPU in front, so that the number of the device's operators stays small
            return to_mps(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)


@contextmanager
def pretended_mps() -> Iterator[None]:
    """Within it torch has the device `mps`."""
    run_backward = torch.autograd.graph._engine_run_backward
    autocast, enabled, dtype = torch.autocast.__init__, torch.is_autocast_enabled, torch.get_autocast_dtype

    def run_backward_on_device(*args: Any, **kwargs: Any) -> Any:
        # `backward` is itself a call that the mode sees, and hand-written gradients within it are not seen
        with torch._C._EnableTorchFunction(), Calls():
            return run_backward(*args, **kwargs)

    def host_type(device_type: str | None) -> str:
        return "cpu" if device_type in ("mps", None) else str(device_type)

    def make_autocast(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, host_type(device_type), *args, **kwargs)

    def enter_inference(self: Any) -> None:
        # tensors of inference mode cannot be wrapped; without gradients the same is computed
        self.was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.was_enabled and not self.mode)

    replaced: dict[str, Any] = {
        "torch.backends.mps.is_available": lambda: True,
        "torch.backends.mps.is_macos_or_newer": lambda major, minor: True,
        "torch.backends.mps.get_name": lambda: "pretended M9",
        "torch.mps.get_rng_state": lambda device="mps": torch.get_rng_state(),
        "torch.mps.set_rng_state": lambda state, device="mps": torch.set_rng_state(state),
        "torch.mps.recommended_max_memory": lambda: 16 << 30,
        "torch.mps.synchronize": lambda: None,
        "torch.cuda.is_available": lambda: False,
        "torch.autocast.__init__": make_autocast,
        "torch.is_autocast_enabled": lambda device_type=None: enabled(host_type(device_type)),
        "torch.get_autocast_dtype": lambda device_type: dtype(host_type(device_type)),
        "torch.autograd.graph._engine_run_backward": run_backward_on_device,
        "torch.autograd._engine_run_backward": run_backward_on_device,
        "torch.inference_mode.__enter__": enter_inference,
        "torch.inference_mode.__exit__": lambda self, *error: torch._C._set_grad_enabled(self.was_enabled),
    }
    REFUSED.clear()
    with ExitStack() as patches:
        for name, value in replaced.items():
            patches.enter_context(patch(name, value))
        patches.enter_context(Calls())
        patches.enter_context(Operators())
        yield


def move_model(model: ModelT) -> ModelT:
    """Put the weights and buffers of a model on the device, tied ones once; as `.to("mps")` would."""
    moved: dict[int, Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    copied = OnMps(tensor.detach().clone())
                    is_weight = isinstance(tensor, nn.Parameter)
                    moved[id(tensor)] = nn.Parameter(copied, tensor.requires_grad) if is_weight else copied
                store[name] = moved[id(tensor)]  # type: ignore[assignment]
    return model
