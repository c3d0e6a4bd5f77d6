"""Comparisons of a tool's results with those of the model itself."""

import torch
from torch import Tensor

TOLERANCE = 1e-5
"""Of the largest number."""
HALF_TOLERANCE = 0.1
"""Of half precision, in the mean of squares: routes and clusters may be other ones."""


class WrongResult(Exception):
    """A tool gives something else than the model."""


def compare(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    """Raise WrongResult if two tensors differ by more than `tolerance` of the largest number."""
    if found.shape != expected.shape:
        raise WrongResult(f"{what}: shape {tuple(found.shape)} in place of {tuple(expected.shape)}")
    found, expected = (x.detach().double() for x in (found, expected))
    # masked logits
    same = torch.isinf(expected) & (found == expected)
    difference = torch.where(same, 0.0, found - expected).abs().max()
    scale = torch.where(torch.isinf(expected), 0.0, expected).abs().max().clamp(min=1e-3)
    if not difference <= tolerance * scale:
        raise WrongResult(f"{what}: {difference:.1e} apart of {scale:.1e}")


def compare_all(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    """`compare` for each of several tensors, by the scale of all together."""
    if set(found) != set(expected):
        raise WrongResult(f"other names: {sorted(set(found) ^ set(expected))[:3]}")
    vectors = [
        torch.cat([x.detach().double().flatten() for _, x in sorted(each.items())]) for each in (found, expected)
    ]
    compare(*vectors, "gradients", tolerance)


def compare_halves(found: Tensor, expected: Tensor, what: str) -> None:
    """Raise WrongResult if a result of half precision is no approximation."""
    found, expected = (torch.where(torch.isinf(x), 0.0, x.detach().double()) for x in (found, expected))
    share = (found - expected).norm() / expected.norm().clamp(min=1e-3)
    if not share <= HALF_TOLERANCE:
        raise WrongResult(f"{what}: {share:.1e} of its norm apart")
