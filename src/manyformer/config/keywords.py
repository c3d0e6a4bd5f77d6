"""Check the model section against the signature of the recipe's function: names and types."""

import inspect
import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError, WrapValidator
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from manyformer.config.setting_names import RENAMED_VALUES, suggest_setting
from manyformer.config.yaml_scalars import format_value
from manyformer.errors import suggest_names

_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_TYPE_NAMES |= {inspect.Parameter.empty: ""}
_BOUNDS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))
_STRICT_CONFIG = ConfigDict(strict=True, allow_inf_nan=False)


def check_keyword(name: str, value: Any, signature: inspect.Signature, valid_names: list[str]) -> tuple[Any, str]:
    """Validate a model keyword: returns the converted value and an empty text, or the value and an error message."""
    if name not in signature.parameters:
        return value, f"no such setting; {suggest_setting(f'model.{name}', valid_names)}"
    annotation = signature.parameters[name].annotation
    if annotation in (inspect.Parameter.empty, Any):
        return value, ""
    try:
        return _validate_type(value, annotation), ""
    except ValidationError:
        return value, type_error_text(value, annotation)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value, ""  # a type that only the recipe itself can judge


def _validate_type(value: Any, annotation: Any) -> Any:
    adapter = TypeAdapter(annotation, config=_STRICT_CONFIG)
    try:
        # Validating JSON converts a list to a tuple where the type requires one, but never text to a number.
        parsed = adapter.validate_json(json.dumps(value))
    except ValidationError:
        if not isinstance(value, float) or not value.is_integer():
            raise
        parsed = adapter.validate_json(json.dumps(int(value)))
    return adapter.dump_python(parsed, mode="json")


def type_error_text(value: Any, annotation: Any) -> str:
    """The error message for a value that does not have the type."""
    members = [_without_metadata(part) for part in _union_members(_without_metadata(annotation))]
    options = [option for part in members if get_origin(part) is Literal for option in get_args(part)]
    if not options:
        return f"must be {type_text(annotation)}, got {format_value(value)}"
    return choice_error_text(value, [*options, *([None] if type(None) in members else [])])


def meaning_of(annotation: Any) -> str:
    """The meaning of a keyword: the text in its `Annotated` type, or empty."""
    metadata = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((item for item in metadata if isinstance(item, str)), "")


def choice_error_text(value: Any, options: list[Any]) -> str:
    """The error message for a value that is no option, such as `'x' is not one of a, b; did you mean a?`"""
    texts = [option if isinstance(option, str) else format_value(option) for option in options]
    message = f"{format_value(value)} is not one of {', '.join(texts)}"
    if not isinstance(value, str):
        return message
    if (renamed := RENAMED_VALUES.get(value)) in texts:
        return f"{message}; {value} is now {renamed}"
    suggestion = suggest_names(value, texts)
    return f"{message}; {suggestion}" if suggestion.startswith("did") else message


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


def _bounds_text(metadata: tuple[Any, ...]) -> str:
    bounds = []
    for item in metadata:
        # pydantic stores the bounds of a Field either as one item with `metadata` or as separate items
        for bound in getattr(item, "metadata", [item]):
            bounds += [f"{sign} {getattr(bound, name)}" for kind, name, sign in _BOUNDS if isinstance(bound, kind)]
    return f" {' and '.join(bounds)}" if bounds else ""


def _without_metadata(annotation: Any) -> Any:
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def _union_members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
