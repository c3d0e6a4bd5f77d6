"""Linear attention to all keys of the own document: one sum for each document, made once."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from manyformer.core import PADDING_SEGMENT, ContiguousLayout, TokenPositions
from manyformer.masks import AllKeys
from manyformer.ops.linear_attention import divide_by_normalizer


class DocumentSums(NamedTuple):
    """For each document that keys were given of, its number, their sum, and the logarithm of the sum's scale.

    The numbers are the same in every row; a row without such a document has zeros. Before the first key there are none.
    """

    numbers: tuple[int, ...] = ()
    matrix: Float[Tensor, "b n g r f"] | None = None
    level: Float[Tensor, "b n g"] | None = None

    @property
    def empty(self) -> bool:
        """Whether no key has been given."""
        return not self.numbers


def sum_keys(
    c: Float[Tensor, "b g s r"],
    log: Float[Tensor, "b g s"] | None,
    v: Float[Tensor, "b g s f"],
    key_positions: TokenPositions,
    before: DocumentSums,
) -> DocumentSums:
    """The sums after these keys too; each key is to be given once."""
    if c.shape[2] == 0:
        return before
    known = before.numbers
    numbers = (*known, *(number for number in _numbers(key_positions) if number not in known))
    columns = F.pad(v, (0, 1), value=1.0)
    sums = []
    for place, document in enumerate(numbers):
        here = (
            None
            if isinstance(key_positions.layout, ContiguousLayout)
            else (key_positions.segment_ids == document)[:, None]
        )
        matrix, level = _sum_of(c, log, columns, here)
        if place < len(known):
            assert before.matrix is not None
            old = None if before.level is None else before.level[:, place]
            matrix, level = _joined(before.matrix[:, place], old, matrix, level)
        sums.append((matrix, level))
    if not sums:
        return before
    levels = [level for _, level in sums if level is not None]
    return DocumentSums(
        numbers, torch.stack([matrix for matrix, _ in sums], 1), torch.stack(levels, 1) if levels else None
    )


def read_sums(
    a: Float[Tensor, "b h l r"], query_positions: TokenPositions, summary: DocumentSums, values: int, floor: float
) -> Float[Tensor, "b h l f"]:
    """The `values` channels that queries get from the sum of their document; zeros where there is none."""
    if summary.matrix is None:
        return a.new_zeros(*a.shape[:3], values)
    # each head of keys as often as query heads share it
    matrix = summary.matrix.repeat_interleave(a.shape[1] // summary.matrix.shape[2], 2)
    if isinstance(query_positions.layout, ContiguousLayout) and summary.numbers == (0,):
        return divide_by_normalizer(a @ matrix[:, 0], floor)
    y = a.new_zeros(*a.shape[:3], values + 1)
    for place, number in enumerate(summary.numbers):
        y = torch.where((query_positions.segment_ids == number)[:, None, :, None], a @ matrix[:, place], y)
    return divide_by_normalizer(y, floor)


def document_sums_reference(
    a: Float[Tensor, "b h l r"],
    c: Float[Tensor, "b g s r"],
    log: Float[Tensor, "b g s"] | None,
    v: Float[Tensor, "b g s f"],
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    floor: float,
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
    """The definition, with every pair written out: outputs and weights."""
    shared = a.shape[1] // c.shape[1]
    c, v = c.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    seen = AllKeys().dense(query_positions, key_positions, 1)
    pairs = a @ c.mT
    if log is not None:
        scale = log.repeat_interleave(shared, 1)[:, :, None].masked_fill(~seen, -torch.inf)
        pairs = pairs * (scale - scale.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(a.dtype).min)).exp()
    pairs = pairs.masked_fill(~seen, 0.0)
    y = divide_by_normalizer(pairs @ F.pad(v, (0, 1), value=1.0), floor)
    return y, pairs / pairs.sum(-1, keepdim=True).clamp(min=floor)


def _numbers(key_positions: TokenPositions) -> list[int]:
    if isinstance(key_positions.layout, ContiguousLayout):
        return [0]
    found: list[int] = torch.unique(key_positions.segment_ids).tolist()
    return [number for number in found if number != PADDING_SEGMENT]


def _sum_of(c: Tensor, log: Tensor | None, columns: Tensor, here: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The sum over the keys that are `here`, over exp(level) where features have a scale."""
    if log is None:
        return c.mT @ (columns if here is None else columns * here[..., None]), None
    log = log if here is None else log.masked_fill(~here, -torch.inf)
    level = log.detach().amax(-1)
    # without a key the sum is zero on any scale
    scale = (log - level.masked_fill(level == -torch.inf, 0.0)[..., None]).exp()
    return c.mT @ (columns * scale[..., None]), level


def _joined(old: Tensor, was: Tensor | None, new: Tensor, level: Tensor | None) -> tuple[Tensor, Tensor | None]:
    if was is None or level is None:
        return old + new, None
    top = was.maximum(level)
    fixed = top.masked_fill(top == -torch.inf, 0.0)
    parts = (part * (scale - fixed).exp()[..., None, None] for part, scale in ((old, was), (new, level)))
    return sum(parts, torch.zeros_like(old)), top
