"""A tensor that keeps its numbers on the CPU and says that it is on `cuda:0`.

For torch's C++ code it is on the device "meta", with the dispatch keys of CUDA. So autocast, autograd and composite
operators treat it as CUDA's; and whatever they make "on the same device" asks for "meta", which no tensor of the CPU
does: the two devices cannot be confused. Python sees `cuda:0`. (It cannot be `cuda:0` for C++ too: autograd would then
ask for the streams of a GPU.)
"""

import copy
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

DEVICE = torch.device("cuda", 0)
SEEN_BY_TORCH = torch.device("meta")


class PretendedTensor(torch.Tensor):
    """A tensor on the pretended device, with `numbers` on the CPU; made by the operators of `PretendedOperators`."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> "PretendedTensor":
        size, stride, offset = numbers.size(), numbers.stride(), numbers.storage_offset()
        shell = torch.empty_strided(size, stride, dtype=numbers.dtype, device="meta")
        if offset:
            # code that makes views by hand reads it
            reach = offset + 1 + sum((count - 1) * step for count, step in zip(size, stride))
            shell = torch.empty(reach, dtype=numbers.dtype, device="meta").as_strided(size, stride, offset)
        tensor = torch.Tensor._make_subclass(cls, shell, False, device_for_backend_keys=DEVICE)
        tensor.numbers = numbers
        return tensor

    # methods of torch must not turn their results into this class by themselves: the operators decide
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(f"{func} of a tensor of the pretended device, outside `pretended_device()`")

    @property
    def device(self) -> torch.device:
        return DEVICE

    @property
    def is_cuda(self) -> bool:
        return True

    @property
    def is_cpu(self) -> bool:
        return False

    @property
    def is_meta(self) -> bool:
        return False

    def get_device(self) -> int:
        return 0

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        # for torch this tensor is on "meta", and it would copy to "cuda" what is there already
        args = tuple(SEEN_BY_TORCH if is_pretended_device(arg) else arg for arg in args)
        if is_pretended_device(kwargs.get("device")):
            kwargs["device"] = SEEN_BY_TORCH
        return super().to(*args, **kwargs)

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        return self

    def numpy(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.numpy()

    def tolist(self) -> Any:
        if self.ndim == 0:
            return self.item()
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **options: Any) -> Tensor:
        options = {"dtype": self.dtype, "device": DEVICE} | options
        return torch.tensor(data, **options)

    def pin_memory(self, *args: Any) -> NoReturn:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def is_pinned(self, *args: Any) -> bool:
        return False

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_with_index_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_with_index_tensors(index), value)

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.numbers.untyped_storage()

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PretendedTensor":
        if id(self) not in memo:
            duplicate = self.detach().clone().requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                duplicate = torch.nn.Parameter(duplicate, requires_grad=self.requires_grad)
            memo[id(self)] = duplicate
            if self.grad is not None:
                duplicate.grad = copy.deepcopy(self.grad, memo)
        duplicate = memo[id(self)]
        assert isinstance(duplicate, PretendedTensor)
        return duplicate

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a tensor on cuda was pickled: the package writes tensors of the CPU")

    def __repr__(self, **options: Any) -> str:
        return f"{self.numbers!r} on {DEVICE}"


def _with_index_tensors(index: Any) -> Any:
    """An index whose lists are tensors on the device, which torch would make there: on "meta", without numbers."""
    if isinstance(index, list | np.ndarray):
        return torch.tensor(index, device=DEVICE)
    if isinstance(index, tuple):
        return tuple(_with_index_tensors(part) for part in index)
    return index


def is_pretended_device(device: Any) -> bool:
    """Whether this argument names the pretended device, as Python names it or as torch's C++ code does."""
    return isinstance(device, str | torch.device) and torch.device(device).type in ("cuda", "meta")


def numbers_of(tensor: Tensor) -> Tensor:
    """The numbers of a tensor of either device, as a tensor of the CPU, without a wait."""
    return tensor.numbers if isinstance(tensor, PretendedTensor) else tensor
