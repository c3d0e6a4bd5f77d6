"""Rows of documents and padding, in all the ways that they come, and what is compared on them."""

from typing import Any

import torch
from torch import Tensor

from manyformer.models.embedding import StreamTail, empty_tail, positions_of
from manyformer.nn.core import PADDING_SEGMENT, TokenPositions

LAYOUTS: dict[str, list[list[int]] | None] = {
    "plain": None,
    "right padding": [[0] * 23, [0] * 9 + [PADDING_SEGMENT] * 14],
    "left padding": [[0] * 23, [PADDING_SEGMENT] * 14 + [0] * 9],
    "packed": [
        [0] * 5 + [1] * 8 + [2] * 10,
        [PADDING_SEGMENT] * 3 + [0] * 7 + [PADDING_SEGMENT] * 2 + [1] * 6 + [2] * 5,
    ],
    "single tokens": [[0, 1, 2, 3, 4] + [5] * 18, [7, PADDING_SEGMENT, 8, PADDING_SEGMENT, 9] + [3] * 17 + [0]],
    "nothing but padding": [[PADDING_SEGMENT] * 23, [4] * 23],
}
LENGTH, ROWS = 23, 2


def segments_of(name: str) -> Tensor | None:
    rows = LAYOUTS[name]
    return None if rows is None else torch.tensor(rows)


def place_of(name: str) -> TokenPositions:
    return positions_of(torch.zeros(ROWS, LENGTH, dtype=torch.long), segments_of(name), None)[0]


def real_of(name: str) -> Tensor:
    segments = segments_of(name)
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool) if segments is None else segments != PADDING_SEGMENT
    return real[:, None, :, None]


def documents_of(name: str) -> list[tuple[int, Tensor]]:
    """Row and columns of each document."""
    seg = place_of(name).segment_ids
    rows = [(row, number) for row in range(ROWS) for number in seg[row].unique().tolist() if number != PADDING_SEGMENT]
    return [(row, (seg[row] == number).nonzero().flatten()) for row, number in rows]


def in_steps(name: str, sizes: list[int]) -> list[tuple[slice, TokenPositions]]:
    """Places of chunks of these sizes, as a stream of them has it."""
    segments, actual, begin = segments_of(name), [], 0
    tail: StreamTail | None = empty_tail(ROWS, torch.device("cpu"))
    for size in sizes:
        part = slice(begin, begin + size)
        tokens = torch.zeros(ROWS, size, dtype=torch.long)
        place, tail = positions_of(tokens, None if segments is None else segments[:, part], tail)
        actual.append((part, place))
        begin += size
    assert begin == LENGTH
    return actual


def tensors(heads: int, groups: int, key: int, value: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Queries, keys and values that take gradients."""
    shapes = ((heads, key), (groups, key), (groups, value))
    return tuple(torch.randn(ROWS, h, LENGTH, e, dtype=dtype, requires_grad=True) for h, e in shapes)


def differentiated(y: Tensor, grad_output: Tensor, inputs: Any) -> tuple[Tensor, ...]:
    """y and the gradients of its product with `up`; both must be zero where nothing is asked."""
    return y, *torch.autograd.grad((y * grad_output).sum(), inputs)


def apart(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> float:
    """The largest difference relative to the size of what is right."""
    worst = 0.0
    for actual, expected in zip(left, right, strict=True):
        assert actual.isfinite().all()
        worst = max(worst, float(((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).detach()))
    return worst
