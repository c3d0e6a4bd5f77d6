"""Equal tensors of two libraries, as rules that are read in both directions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TensorMap = Callable[[Sequence[Tensor]], Sequence[Tensor]]

WEIGHT, BIAS = ("weight",), ("bias",)
PARAMETERS = (*WEIGHT, *BIAS)
"""The kinds of the parameters of most modules."""


class TensorRule(NamedTuple):
    """Tensors of a foreign model that hold the same numbers as some of ours, and the functions from each to the other.

    Both functions are linear, so that gradients may be mapped as well."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    to_ours: TensorMap
    to_theirs: TensorMap


def same(theirs: str, ours: str) -> TensorRule:
    """Equal tensors."""
    return TensorRule((theirs,), (ours,), tuple, tuple)


def transposed(theirs: str, ours: str) -> TensorRule:
    """A matrix that the other library stores as (inputs, outputs)."""
    return TensorRule((theirs,), (ours,), _transpose, _transpose)


def reshaped(theirs: str, ours: str, their_shape: Sequence[int], our_shape: Sequence[int]) -> TensorRule:
    """The same numbers in the same order with other axes."""
    return TensorRule((theirs,), (ours,), lambda x: [x[0].reshape(*our_shape)], lambda x: [x[0].reshape(*their_shape)])


def shifted(theirs: str, ours: str, offset: float) -> TensorRule:
    """Our tensor is theirs plus a number."""
    return TensorRule((theirs,), (ours,), lambda x: [x[0] + offset], lambda x: [x[0] - offset])


def padded_rows(theirs: str, ours: str, rows: int) -> TensorRule:
    """Our tensor is theirs without so many rows at its start, which are 0 on the way back."""

    def to_theirs(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat([x[0].new_zeros(rows, *x[0].shape[1:]), x[0]])]

    return TensorRule((theirs,), (ours,), lambda x: [x[0][rows:]], to_theirs)


def first_row(theirs: str, ours: str, rows: int) -> TensorRule:
    """Our vector is the first row of their table of so many rows, whose others are 0 on the way back."""

    def to_theirs(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.cat([x[0][None], x[0].new_zeros(rows - 1, x[0].shape[0])])]

    return TensorRule((theirs,), (ours,), lambda x: [x[0][0]], to_theirs)


def constant(ours: str, value: Tensor) -> TensorRule:
    """A tensor of ours that follows from the keywords, and that the other library does not store."""
    return TensorRule((), (ours,), lambda x: [value], lambda x: [])


def unused(theirs: str, shape: Sequence[int]) -> TensorRule:
    """A tensor that only the other library has: left out of imports, and zeros in exports."""
    return TensorRule((theirs,), (), lambda x: [], lambda x: [torch.zeros(*shape)])


def scaled(theirs: str, ours: str, factor: float) -> TensorRule:
    """Our tensor is theirs times a number."""
    return TensorRule((theirs,), (ours,), lambda x: [x[0] * factor], lambda x: [x[0] / factor])


def stacked(theirs: Sequence[str], ours: str, sizes: Sequence[int]) -> TensorRule:
    """Our tensor has the rows of theirs, of which there are so many, one after another."""
    return TensorRule(tuple(theirs), (ours,), lambda x: [torch.cat(list(x))], lambda x: torch.split(x[0], list(sizes)))


def stacked_experts(theirs: Sequence[str], ours: str) -> TensorRule:
    """Our tensor has an axis more, along which theirs stand: a matrix of each expert."""
    return TensorRule(tuple(theirs), (ours,), lambda x: [torch.stack(list(x))], lambda x: x[0].unbind())


def divided(theirs: str, ours: Sequence[str], sizes: Sequence[int], *, is_transposed: bool = False) -> TensorRule:
    """Their tensor has the rows of ours, of which there are so many; a matrix may be stored as (inputs, outputs)."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.split(x[0].T if is_transposed else x[0], list(sizes))

    def to_theirs(x: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(x))
        return [joined.T if is_transposed else joined]

    return TensorRule((theirs,), tuple(ours), to_ours, to_theirs)


def grouped(theirs: str, ours: Mapping[str, Sequence[int]], groups: int) -> TensorRule:
    """Our tensors have blocks of so many rows; theirs has, for each of `groups` in turn, a share of every block."""
    sizes = [rows for blocks in ours.values() for rows in blocks]

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        by_group = x[0].view(groups, -1, *x[0].shape[1:])
        blocks = iter(torch.split(by_group, [rows // groups for rows in sizes], 1))
        return [torch.cat([next(blocks).flatten(0, 1) for _ in rows]) for rows in ours.values()]

    def to_theirs(x: Sequence[Tensor]) -> Sequence[Tensor]:
        blocks = [block for part, rows in zip(x, ours.values(), strict=True) for block in torch.split(part, list(rows))]
        by_group = [block.view(groups, -1, *block.shape[1:]) for block in blocks]
        return [torch.cat(by_group, 1).flatten(0, 1)]

    return TensorRule((theirs,), tuple(ours), to_ours, to_theirs)


def depthwise(theirs: str, ours: str) -> TensorRule:
    """The weights (channels, 1, taps) of a convolution of each channel, which we have as (taps, channels)."""
    return TensorRule((theirs,), (ours,), lambda x: [x[0][:, 0].mT], lambda x: [x[0].mT[:, None]])


def interleaved(theirs: str, ours: Sequence[str]) -> TensorRule:
    """Their channels alternate between our two tensors; matrices of experts are stored as (inputs, outputs)."""

    def to_ours(x: Sequence[Tensor]) -> Sequence[Tensor]:
        parts = (x[0][..., 0::2], x[0][..., 1::2])
        return [part.mT if part.ndim == 3 else part for part in parts]

    def to_theirs(x: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack([part.mT if part.ndim == 3 else part for part in x], -1).flatten(-2)]

    return TensorRule((theirs,), tuple(ours), to_ours, to_theirs)


def each_parameter(theirs: str, ours: str, kinds: Iterable[str] = PARAMETERS) -> list[TensorRule]:
    """Equal parameters of two modules."""
    return [same(f"{theirs}.{kind}", f"{ours}.{kind}") for kind in kinds]


def attention_projections(
    theirs: Sequence[str], ours: str, kv_rows: Sequence[int], kinds: Iterable[str] = PARAMETERS
) -> Iterator[TensorRule]:
    """The projections of queries, keys, values and outputs, of which we have keys and values in one."""
    query, key, value, output = theirs
    for kind in kinds:
        yield same(f"{query}.{kind}", f"{ours}.q_proj.{kind}")
        yield stacked([f"{key}.{kind}", f"{value}.{kind}"], f"{ours}.kv_proj.{kind}", kv_rows)
        yield same(f"{output}.{kind}", f"{ours}.out_proj.{kind}")


def each_module(
    theirs: str, ours: str, names: Mapping[str, str], kinds: Iterable[str] = PARAMETERS
) -> Iterator[TensorRule]:
    """Equal parameters of several modules, from their names below `theirs` to ours below `ours`."""
    for their_name, our_name in names.items():
        yield from each_parameter(f"{theirs}.{their_name}", f"{ours}.{our_name}", kinds)


def _transpose(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensors[0].mT]
