"""Tensors as a digest of all their bits, with a few of their numbers, so that two of them can also be told apart."""

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

KEPT_NUMBERS = 24


def fingerprint(tensor: Tensor) -> dict[str, Any]:
    """The digest of a tensor, its shape, its root mean square, and numbers spread over all of it."""
    numbers = tensor.detach().cpu().contiguous()
    flat = numbers.reshape(-1)
    kept = torch.linspace(0, flat.numel() - 1, min(KEPT_NUMBERS, flat.numel())).long()
    return {
        "digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:20],
        "shape": list(numbers.shape),
        "scale": float(flat.double().square().mean().sqrt()) if flat.numel() else 0.0,
        "numbers": [float(number) for number in flat[kept]],
    }


def is_fingerprint(value: Any) -> bool:
    """Whether a value of a record is the fingerprint of a tensor."""
    return isinstance(value, dict) and "digest" in value and "numbers" in value


def numbers_apart(old: list[float], new: list[float], scale: float = 0.0) -> str:
    """How far two lists of numbers lie apart, in words; `scale` is the size of the numbers they are taken from."""
    if len(old) != len(new):
        return f"{len(old)} numbers before, {len(new)} now"
    apart = [abs(a - b) for a, b in zip(old, new) if not (a == b or (math.isnan(a) and math.isnan(b)))]
    if not apart:
        return "equal where numbers are kept"
    largest = max(apart)
    size = max(scale, *(abs(number) for number in old if math.isfinite(number)), 1e-30)
    first = next(index for index, (a, b) in enumerate(zip(old, new)) if a != b)
    return f"{largest:.2e} apart ({largest / size:.1e} of their size), first at number {first + 1} of {len(old)}"
