"""Arithmetic that must not be cut short."""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast_disabled(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off, on devices that have one: sums of many terms in half precision lose the later ones."""
    there = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if there else nullcontext()
