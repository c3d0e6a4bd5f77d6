"""Checks of arrays in archives: shapes, labels with their names, and the indices of splits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyformer.data.epochs import FIXED_SEED, random_generator
from manyformer.data.findings import Finding, plural
from manyformer.errors import UserError
from manyformer.exact_shares import round_share

NO_LABEL = -1
"""The label of an item that has none."""
MAX_CLASSES = 1 << 16
"""The largest number of labels: an observation has as many outputs."""
SPLIT_NAMES = ("train", "valid", "test")


def whole_numbers(
    arrays: Mapping[str, NDArray[Any]], key: str, shape: tuple[int | None, ...], name: str
) -> NDArray[np.int64]:
    """The array called `key`. Raises UserError unless it has whole numbers and this shape; None is any size."""
    array = arrays[key]
    if array.dtype.kind not in "iu" or not has_shape(array, shape):
        raise UserError(
            f"{name}: {key} must be whole numbers of shape {shape_text(shape)}, and is {describe_array(array)}"
        )
    # unsigned numbers of 64 bits would become negative
    if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
        raise UserError(f"{name}: {key} has the number {array.max():,}, which is too large")
    return array.astype(np.int64)


def check_numbers(
    arrays: Mapping[str, NDArray[Any]],
    key: str,
    shape: tuple[int | None, ...],
    name: str,
    *,
    place: Callable[[int], str],
) -> NDArray[np.float32]:
    """The array called `key`. Raises UserError unless it has this shape, None being any size, and numbers that are
    finite in 32 bits too; `place` names what a number on the first axis stands for, such as "node 3"."""
    array = arrays[key]
    if array.dtype.kind not in "fiub" or not has_shape(array, shape) or 0 in array.shape:
        raise UserError(f"{name}: {key} must be numbers of shape {shape_text(shape)}, and is {describe_array(array)}")
    invalid = ~is_finite_in_32_bits(array).reshape(len(array), -1).all(1)
    if invalid.any():
        raise UserError(f"{name}: the {key} of {place(int(invalid.argmax()))} are no finite numbers")
    return array.astype(np.float32)


def is_finite_in_32_bits(array: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether each number is finite, also as the 32-bit floating point number that a model reads."""
    finite: NDArray[np.bool_] = np.isfinite(array)
    if array.dtype.kind == "f" and array.dtype.itemsize > 4:
        finite &= np.abs(array) <= np.finfo(np.float32).max
    return finite


def check_labels(labels: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]], name: str) -> tuple[str, ...]:
    """The names of the labels. Raises UserError for labels that cannot be learned."""
    highest = int(labels.max(initial=NO_LABEL))
    if int(labels.min(initial=0)) < NO_LABEL or highest >= MAX_CLASSES:
        raise UserError(f"{name}: labels must be 0 to {MAX_CLASSES - 1:,}, or -1 for none")
    if len(np.unique(labels[labels != NO_LABEL])) < 2:
        raise UserError(f"{name}: there must be two different labels at least, and there is nothing to learn")
    if "label_names" not in arrays:
        return tuple(map(str, range(highest + 1)))
    names = arrays["label_names"]
    if names.dtype.kind != "U" or names.shape != (max(len(names.ravel()), highest + 1),):
        raise UserError(f"{name}: label_names must be a text for each of {highest + 1} labels")
    return tuple(names.tolist())


def read_splits(
    arrays: Mapping[str, NDArray[Any]], labels: NDArray[np.int64], name: str
) -> dict[str, NDArray[np.int64]]:
    """The indices of each split. Raises UserError for those that are out of range, shared, or without any label."""
    splits = {key: whole_numbers(arrays, key, (None,), name) for key in SPLIT_NAMES if key in arrays}
    owners: dict[int, str] = {}
    for split, index in splits.items():
        if len(index) and not 0 <= index.min() <= index.max() < len(labels):
            raise UserError(f"{name}: {split} must be numbers from 0 to {len(labels) - 1}")
        for item in index.tolist():
            if owners.setdefault(item, split) != split:
                raise UserError(
                    f"{name}: {split} and {owners[item]} share the number {item}, which may be in one of them"
                )
        if not (labels[index] != NO_LABEL).any():
            raise UserError(f"{name}: there is no label to learn or to score in {split}")
    return splits


def complete_splits(
    named: Mapping[str, NDArray[np.int64]], labels: NDArray[np.int64], valid: float, path: str
) -> dict[str, NDArray[np.int64]]:
    """The splits that an archive names, and others drawn from the rest of the items that have a label.

    `valid` is the fraction that is validation data if none is named. Raises UserError if nothing is left to learn."""
    splits = dict(named)
    free = np.setdiff1d(
        np.flatnonzero(labels != NO_LABEL), np.concatenate([np.zeros(0, dtype=np.int64), *splits.values()])
    )
    if "valid" not in splits:
        pool = splits.get("train", free)
        drawn = random_generator(FIXED_SEED).permutation(pool)
        count = max(1, round_share(valid, len(pool)))
        splits["valid"] = np.sort(drawn[:count])
        splits["train"] = np.sort(drawn[count:])
    splits.setdefault("train", free)
    if not len(splits["train"]):
        raise UserError(f"{path}: there is no label to learn; too few are left when some are held out")
    return {name: splits[name] for name in SPLIT_NAMES if name in splits}


def count_labels(labels: NDArray[np.int64], label_names: Sequence[str]) -> dict[str, int]:
    """How many items have each label, by its name; items without a label are not counted."""
    numbers, counts = np.unique(labels[labels != NO_LABEL], return_counts=True)
    return {label_names[number]: int(count) for number, count in zip(numbers, counts, strict=True)}


def unused_items(splits: Mapping[str, NDArray[np.int64]], labels: NDArray[np.int64], noun: str) -> Iterator[Finding]:
    """What there is to tell of items that have no label, or have one and are in no split."""
    in_split = np.zeros(len(labels), dtype=bool)
    in_split[np.concatenate(list(splits.values()))] = True
    has_label = labels != NO_LABEL
    yield from find_items(~has_label, noun, "without a label")
    yield from find_items(has_label & ~in_split, noun, "in no split, neither learned nor scored")


def find_items(is_found: NDArray[np.bool_], noun: str, text: str) -> Iterator[Finding]:
    """What there is to tell of these items, `text` in words that follow their number; nothing if there are none."""
    if count := int(is_found.sum()):
        yield Finding(count, f"{plural(count, noun)} {text}", f"{noun} {int(is_found.argmax())}")


def has_shape(array: NDArray[Any], shape: tuple[int | None, ...]) -> bool:
    """Whether an array has these sizes, None being any."""
    return array.ndim == len(shape) and all(size in (None, actual) for size, actual in zip(shape, array.shape))


def shape_text(shape: tuple[int | None, ...]) -> str:
    """A shape for messages."""
    return f"({', '.join('any' if size is None else str(size) for size in shape)})"


def describe_array(array: NDArray[Any]) -> str:
    """The type and shape of an array for messages."""
    return f"{array.dtype} of shape {array.shape}"
