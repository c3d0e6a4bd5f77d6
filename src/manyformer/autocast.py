"""Full-precision regions inside autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    """A context manager that disables autocast on `device`: long sums in half precision lose their later terms."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()
