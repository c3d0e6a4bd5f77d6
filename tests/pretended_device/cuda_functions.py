"""The functions of torch that ask for CUDA before any operator runs, replaced while the device is pretended."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _device as default_device
from torch.utils._device import DeviceContext

from pretended_device.autocast import register_autocast
from pretended_device.flex_definition import replace_flex_attention
from pretended_device.operators import PretendedOperators, is_pinned
from pretended_device.tensor import DEVICE, PretendedTensor
from pretended_device.waits import Waits

NAME = "pretended GPU"
MEMORY = 80 * 2**30


class Stream:
    """A stream of a device whose work is done at once."""

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> "Event":
        return Event()

    def synchronize(self) -> None: ...


class Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **options: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True


@contextlib.contextmanager
def pretended_device() -> Iterator[Waits]:
    """Within it torch has one GPU, pretended by tensors that compute on the CPU; gives the waits for it."""
    register_autocast()
    waits = Waits()
    operators = PretendedOperators(waits)
    with contextlib.ExitStack() as stack:
        for owner, name, value in [
            *((torch.cuda, name, value) for name, value in _cuda_functions(operators, waits).items()),
            *((torch.Tensor, name, value) for name, value in _tensor_methods().items()),
            *((torch, name, _moved_factory(getattr(torch, name))) for name in ("tensor", "as_tensor", "asarray")),
            # newer optimizers ask the accelerator whether its stream is being captured
            (torch.accelerator, "current_stream", lambda *args: Stream()),
            (torch, "compile", _compile_nothing),
            (torch, "matmul", _matmul),
            (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
            # a build for CUDA would pin memory by the driver, from threads that know nothing of this device
            (torch.backends.cuda, "is_built", lambda: False),
            (DeviceContext, "__torch_function__", _on_default_device(operators)),
            *((torch.inference_mode, name, value) for name, value in _inference_mode().items()),
        ]:
            stack.callback(_replace(owner, name, value))
        stack.callback(replace_flex_attention())
        # parameters that move become other objects in the place of the old ones, with the class of the device
        stack.callback(
            torch.__future__.set_swap_module_params_on_conversion,
            torch.__future__.get_swap_module_params_on_conversion(),
        )
        torch.__future__.set_swap_module_params_on_conversion(True)
        stack.enter_context(operators)
        yield waits


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; returns what restores it, or deletes it where the owner had inherited it."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    if before is missing:
        return lambda: delattr(owner, name)
    return lambda: setattr(owner, name, before)


def _cuda_functions(operators: PretendedOperators, waits: Waits) -> dict[str, Any]:
    """Names of `torch.cuda` that are asked for on the way to tensors, and what they are here."""

    def seed(number: int) -> None:
        operators.random_state = torch.Generator().manual_seed(number).get_state()

    def set_random_state(state: Tensor, device: Any = None) -> None:
        operators.random_state = state.clone()

    properties = SimpleNamespace(name=NAME, total_memory=MEMORY, major=9, minor=0, multi_processor_count=132)
    return {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "is_bf16_supported": lambda *args, **options: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": lambda device: contextlib.nullcontext(),
        "get_device_name": lambda *args: NAME,
        "get_device_capability": lambda *args: (9, 0),
        "get_device_properties": lambda *args: properties,
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda *args: operators.random_state.clone(),
        "set_rng_state": set_random_state,
        "synchronize": lambda *args: waits.add("synchronize"),
        "current_stream": lambda *args: Stream(),
        "stream": lambda *args: contextlib.nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "empty_cache": lambda: None,
        "memory_allocated": lambda *args: 0,
        "max_memory_allocated": lambda *args: 0,
        "reset_peak_memory_stats": lambda *args: None,
    }


def _tensor_methods() -> dict[str, Any]:
    """Methods of tensors of the CPU that would ask for a GPU before any operator."""
    to = torch.Tensor.to

    def moved(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        # torch asks the driver for the number of the current device, unless it is given
        args = tuple(DEVICE if _names_gpu(arg) else arg for arg in args)
        if args and isinstance(args[0], PretendedTensor):
            args = (DEVICE, args[0].dtype, *args[1:])
        if _names_gpu(options.get("device")):
            options["device"] = DEVICE
        return to(tensor, *args, **options)

    def pinned(tensor: Tensor, *args: Any) -> Tensor:
        duplicate = tensor.clone()
        duplicate.is_pretended_pinned = True  # type: ignore[attr-defined]
        return duplicate

    return {
        "to": moved,
        "cuda": lambda tensor, *args, **options: moved(tensor, DEVICE),
        "pin_memory": pinned,
        "is_pinned": lambda tensor, *args: is_pinned(tensor),
    }


def _names_gpu(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


def _moved_factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A function that makes tensors of numbers of the host: on a GPU it makes them on the CPU and copies them."""

    def make_and_move(data: Any, *args: Any, **options: Any) -> Tensor:
        device = options.get("device")
        if isinstance(data, PretendedTensor) and make.__name__ != "tensor":
            return data.to(*(option for option in (device, options.get("dtype")) if option is not None))
        # torch looks for its own functions where a device is set by default, and ours are others
        device = default_device.CURRENT_DEVICE if device is None else device
        if not _names_gpu(device):
            return make(data, *args, **options)
        needs_gradient = options.pop("requires_grad", False)
        tensor = make(data, *args, **(options | {"device": "cpu"})).to(DEVICE)
        return tensor.requires_grad_() if needs_gradient else tensor

    return make_and_move


def _on_default_device(operators: PretendedOperators) -> Callable[..., Any]:
    """`DeviceContext.__torch_function__` that tells "meta" of Python, for models without weights, from that of C++."""
    on_device = DeviceContext.__torch_function__

    def call(context: DeviceContext, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = operators.is_meta_meant
        operators.is_meta_meant = context.device.type == "meta"
        try:
            return on_device(context, function, types, args, kwargs)
        finally:
            operators.is_meta_meant = before

    return call


_torch_matmul = torch.matmul


def _matmul(x: Tensor, y: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`torch.matmul`, whose `out` torch does not write through to tensors of classes like ours."""
    if not isinstance(out, PretendedTensor):
        return _torch_matmul(x, y, out=out)
    return out.copy_(_torch_matmul(x, y))


def _inference_mode() -> dict[str, Any]:
    """Inference mode as one without gradients: torch makes no views of its own tensors of classes like ours."""

    def enter(mode: Any) -> None:
        mode.had_gradients = torch.is_grad_enabled()
        torch.set_grad_enabled(not mode.mode)

    def leave(mode: Any, *error: Any) -> None:
        torch.set_grad_enabled(mode.had_gradients)

    return {"__enter__": enter, "__exit__": leave}


def _compile_nothing(model: Any = None, **options: Any) -> Any:
    """`torch.compile` that leaves functions as they are: compiled code would not meet pretended tensors."""
    return (lambda function: function) if model is None else model
