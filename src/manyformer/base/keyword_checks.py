"""The check of recipe keywords in run files, on the command line, in Python and in saved models, and its words."""

import functools
import inspect
import json
import numbers
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError, WrapValidator
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from manyformer.base.errors import UserError, format_value, suggest_names

MAX_KEYWORD = (1 << 31) - 1
"""The largest whole number that a keyword may be: products of two are numbers of 64 bits."""

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_TYPE_NAMES |= {inspect.Parameter.empty: ""}
_BOUNDS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))
_STRICT_CONFIG = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Default:
    """The default of a keyword in a record that several recipes share: a TypedDict whose types contain defaults."""

    value: Any


@dataclass(frozen=True)
class SharedKeywords:
    """Keywords that recipes of a kind have besides those of their functions, and what they change in a built model.

    `record` is a TypedDict whose types contain a `Default`. `read` gives the change for their values; it raises
    UserError for values that exclude each other."""

    record: type
    read: Callable[[dict[str, Any]], Callable[[Any], Any]]


def checked_keywords(recipe: str, keywords: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """The keywords of a recipe with the types of its signature. Raises UserError for the first that is wrong."""
    check_names(recipe, keywords, signature.parameters)
    checked: dict[str, Any] = {}
    for name, value in keywords.items():
        checked[name], problem = check_value(value, signature.parameters[name].annotation)
        if problem:
            raise UserError(f"{name}: {problem}")
    return checked


def check_names(recipe: str, names: Iterable[str], valid_names: Iterable[str]) -> None:
    """Raise UserError for the first name that is no keyword of the recipe, with the nearest one."""
    valid = set(valid_names)
    for name in names:
        if name not in valid:
            raise UserError(f"{recipe} has no keyword '{name}'; {suggest_names(name, valid)}")


def check_value(value: Any, annotation: Any) -> tuple[Any, str]:
    """The value of a keyword with its type and an empty text, or the value as it is and what is wrong with it."""
    if annotation in (inspect.Parameter.empty, Any):
        return value, ""
    number = _plain_number(value)
    try:
        # a number of NumPy has no JSON text
        typed = _with_type(number, annotation)
    except ValidationError:
        return value, type_error_text(value, annotation)
    except (PydanticSchemaGenerationError, PydanticUserError, NameError):
        return value, ""  # a type that only the recipe itself can judge
    if isinstance(typed, int) and abs(typed) > MAX_KEYWORD:
        return value, f"must be at most {MAX_KEYWORD}, got {format_value(value)}"
    return typed, ""


def as_json(value: Any) -> Any:
    """The value of a keyword as JSON and YAML have it, which know lists alone."""
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    return value


def _plain_number(value: Any) -> Any:
    """The number of Python that equals a number of another library, such as NumPy; other values as they are."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return value


def _with_type(value: Any, annotation: Any) -> Any:
    adapter = _adapter(annotation)
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        # an object of Python, which no file can name
        return adapter.validate_python(value)
    try:
        # Validating JSON converts a list to a tuple where the type requires one, but never text to a number.
        return adapter.validate_json(text)
    except ValidationError:
        # only a whole number in the form of a float is worth another look
        if not isinstance(value, float) or not value.is_integer():
            raise
        # Users type `ff_dim=1e3`, which YAML reads as a float.
        return adapter.validate_json(json.dumps(int(value)))


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(annotation)
    except TypeError:
        # metadata without a hash
        return TypeAdapter(annotation, config=_STRICT_CONFIG)


@functools.cache
def _cached_adapter(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation, config=_STRICT_CONFIG)


def type_error_text(value: Any, annotation: Any) -> str:
    """The error message for a value that does not have the type."""
    members = [_without_metadata(part) for part in _union_members(_without_metadata(annotation))]
    options = [option for part in members if get_origin(part) is Literal for option in get_args(part)]
    if not options:
        return f"must be {type_text(annotation)}, got {format_value(value)}"
    return choice_error_text(value, [*options, *([None] if type(None) in members else [])])


def choice_error_text(value: Any, options: list[Any]) -> str:
    """The error message for a value that is no option, such as `'x' is not one of a, b; did you mean a?`"""
    texts = [option if isinstance(option, str) else format_value(option) for option in options]
    message = f"{format_value(value)} is not one of {', '.join(texts)}"
    suggestion = ""
    if isinstance(value, str):
        suggestion = suggest_names(value, texts)
    if suggestion.startswith("did"):
        return f"{message}; {suggestion}"
    return message


def meaning_of(annotation: Any) -> str:
    """The meaning of a keyword: the text in its `Annotated` type, or empty."""
    if get_origin(annotation) is not Annotated:
        return ""
    return next((item for item in get_args(annotation)[1:] if isinstance(item, str)), "")


def type_text(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """A type in words: `a whole number greater than 0 or null`."""
    for item in metadata:
        if isinstance(item, WrapValidator) and item.func.__doc__:
            return str(item.func.__doc__)
    if get_origin(annotation) is Annotated:
        inner, *constraints = get_args(annotation)
        return type_text(inner, (*metadata, *constraints))
    parts = _union_members(annotation)
    if len(parts) > 1:
        part_texts = [type_text(part, metadata if part is not type(None) else ()) for part in parts]
        return " or ".join(dict.fromkeys(part_texts))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(str(option) for option in get_args(annotation))}"
    if get_origin(annotation) in (tuple, list):
        inner = [type_text(part) for part in get_args(annotation) if part is not Ellipsis]
        return f"a list of {' and '.join(dict.fromkeys(inner))}"
    return _TYPE_NAMES.get(annotation, getattr(annotation, "__name__", str(annotation))) + _bounds_text(metadata)


class KeywordHelp(NamedTuple):
    """A keyword of a recipe: its type in words, its default, and its meaning."""

    name: str
    type: str
    default: Any
    meaning: str


def describe_keywords(signature: inspect.Signature) -> list[KeywordHelp]:
    """Describe the keywords of a recipe, in the order of its signature."""
    return [
        KeywordHelp(keyword.name, type_text(keyword.annotation), keyword.default, meaning_of(keyword.annotation))
        for keyword in signature.parameters.values()
    ]


def _bounds_text(metadata: tuple[Any, ...]) -> str:
    bounds = []
    for item in metadata:
        # pydantic stores the bounds of a Field either as one item with `metadata` or as separate items
        for bound in getattr(item, "metadata", [item]):
            bounds += [f"{sign} {getattr(bound, name)}" for kind, name, sign in _BOUNDS if isinstance(bound, kind)]
    if bounds:
        return f" {' and '.join(bounds)}"
    return ""


def _without_metadata(annotation: Any) -> Any:
    if get_origin(annotation) is Annotated:
        return get_args(annotation)[0]
    return annotation


def _union_members(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) in (Union, types.UnionType):
        return get_args(annotation)
    return (annotation,)
