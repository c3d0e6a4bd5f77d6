"""Modules away from where they start."""

from typing import Any

import torch
from torch import nn


def perturb(module: nn.Module, scale: float) -> Any:
    """The module, with noise added to each parameter: no bias is zero, no norm the identity, no gate closed."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=scale)
    return module
