"""What differs between two records, in sentences that name the place and say how far apart the numbers are."""

import difflib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from sameness.fingerprints import is_fingerprint, numbers_apart

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
LINES_SHOWN = 4
UNCOMPARED = {"seconds"}


class Difference(NamedTuple):
    """The place in both records, as names from the outermost, and a sentence."""

    place: tuple[str, ...]
    sentence: str


def differences(old: Any, new: Any, place: tuple[str, ...] = ()) -> Iterator[Difference]:
    """Every difference, in the order of the old record."""
    if old == new and type(old) is type(new):
        return
    if is_fingerprint(old) and is_fingerprint(new):
        if (old["digest"], old["shape"]) != (new["digest"], new["shape"]):
            yield Difference(place, _tensors_apart(old, new))
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        yield from _in_mappings(old, new, place)
    elif _is_numbers(old) and _is_numbers(new):
        yield Difference(place, numbers_apart(old, new))
    elif isinstance(old, str) and isinstance(new, str):
        yield Difference(place, _texts_apart(old, new))
    elif isinstance(old, float) and isinstance(new, float):
        if not (math.isnan(old) and math.isnan(new)):
            yield Difference(place, numbers_apart([old], [new]))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, (before, after) in enumerate(zip(old, new)):
            yield from differences(before, after, (*place, str(number)))
    else:
        yield Difference(place, f"{_short(old)} before, {_short(new)} now")


def _in_mappings(old: Mapping[str, Any], new: Mapping[str, Any], place: tuple[str, ...]) -> Iterator[Difference]:
    for key, before in old.items():
        if key in UNCOMPARED:
            continue
        if key in new:
            yield from differences(before, new[key], (*place, key))
        else:
            yield Difference((*place, key), f"gone; it was {_short(before)}")
    for key in new:
        if key not in old and key not in UNCOMPARED:
            yield Difference((*place, key), f"new: {_short(new[key])}")


def _is_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, float) for item in value)


def _tensors_apart(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    if old["shape"] != new["shape"]:
        return f"shape {old['shape']} before, {new['shape']} now"
    return numbers_apart(old["numbers"], new["numbers"], old["scale"])


def _texts_apart(old: str, new: str) -> str:
    """The first changed lines, or how far numbers are apart where all words are the same."""
    if NUMBER.sub("#", old) == NUMBER.sub("#", new):
        before = _numbers_in(old)
        after = _numbers_in(new)
        pairs = [(a, b) for a, b in zip(before, after) if a != b]
        shown = ", ".join(f"{a:g} -> {b:g}" for a, b in pairs[:LINES_SHOWN])
        return f"the same words, {len(pairs)} of {len(before)} numbers changed: {shown}"
    changed = [
        line
        for line in difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0)
        if not line.startswith(("---", "+++", "@@"))
    ]
    more = f" and {len(changed) - LINES_SHOWN} lines more" if len(changed) > LINES_SHOWN else ""
    return "".join(f"\n      {line}" for line in changed[:LINES_SHOWN]) + more


def _numbers_in(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in NUMBER.findall(text)]


def _short(value: Any) -> str:
    if is_fingerprint(value):
        return f"a tensor of {value['shape']}"
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
