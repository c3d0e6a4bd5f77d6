"""Full-precision regions inside autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch

from manyformer.torch_internals import constant_for_compiler


@constant_for_compiler
def has_autocast(device_type: str) -> bool:
    """Whether torch has autocast for this type of device; a question that the compiler of torch 2.11 cannot trace."""
    return torch.amp.is_autocast_available(device_type)


def autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    """A context manager that disables autocast on `device`: long sums in half precision lose their later terms."""
    # nothing to disable is the usual case, in which a region costs more than the products of a small layer
    if not has_autocast(device.type) or not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
