"""JSON as text: what every part of this library writes, which never holds the literals NaN and Infinity.

JSON has no such numbers, and most readers refuse a text with them. In what is made for people and for other programs
(results, reports, metrics, pages, what commands print) a number that is not finite is `null`. In records that are read
again as they were (`FileRecord`, `JsonLines`) it is one of the strings "NaN", "Infinity" and "-Infinity".
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

NAMED_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""The strings that stand for numbers that are not finite in a record, with these numbers."""


def json_text(
    value: Any,
    *,
    indent: int | None = None,
    sort_keys: bool = False,
    ensure_ascii: bool = False,
    separators: tuple[str, str] | None = None,
    default: Callable[[Any], str] | None = None,
) -> str:
    """`value` as JSON text; numbers that are not finite become null, and what JSON has not, the text of `default`."""

    def encoded(content: Any) -> str:
        return json.dumps(
            content,
            indent=indent,
            sort_keys=sort_keys,
            ensure_ascii=ensure_ascii,
            separators=separators,
            default=default,
            allow_nan=False,
        )

    try:
        return encoded(value)
    except ValueError:
        # rare, so that the usual text is written without a copy of the value
        return encoded(_replaced(value, lambda number: None))


def with_named_numbers(value: Any) -> Any:
    """`value` of JSON with the names of numbers that are not finite in their place, for a record."""
    return _replaced(value, _name_of)


def _name_of(number: float) -> str:
    if math.isnan(number):
        return "NaN"
    if number > 0:
        return "Infinity"
    return "-Infinity"


def _replaced(value: Any, replacement: Callable[[float], str | None]) -> Any:
    """A copy of `value` with another value in the place of each number that is not finite."""
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return replacement(value)
    if isinstance(value, Mapping):
        # a key cannot be null, so that it has the name of the number
        return {_replaced(key, _name_of): _replaced(part, replacement) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_replaced(part, replacement) for part in value]
    return value
