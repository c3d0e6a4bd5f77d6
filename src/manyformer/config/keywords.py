"""Checking the model section against the signature of the recipe's function: names and types."""

import inspect
import json
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError, WrapValidator
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from manyformer.config.setting_names import suggest
from manyformer.config.yaml_scalars import show
from manyformer.errors import nearest

_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
_BOUNDS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))
_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def check_keyword(name: str, value: Any, signature: inspect.Signature, known: list[str]) -> tuple[Any, str]:
    """The value as the recipe takes it and an empty sentence, or the value and what is wrong with it."""
    if name not in signature.parameters:
        return value, f"no such setting; {suggest(f'model.{name}', known)}"
    annotation = signature.parameters[name].annotation
    if annotation in (inspect.Parameter.empty, Any):
        return value, ""
    try:
        return _fitted(value, annotation), ""
    except ValidationError:
        return value, misfit(value, annotation)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value, ""  # a type that only the recipe itself can judge


def _fitted(value: Any, annotation: Any) -> Any:
    adapter = TypeAdapter(annotation, config=_STRICT)
    forms = [value, int(value)] if isinstance(value, float) and value.is_integer() else [value]
    for form in forms:
        try:
            # By way of JSON a list becomes a tuple where one is wanted, while a word never becomes a number.
            return adapter.dump_python(adapter.validate_json(json.dumps(form)), mode="json")
        except ValidationError:
            if form is forms[-1]:
                raise
    raise AssertionError("unreachable")


def misfit(value: Any, annotation: Any) -> str:
    """What to say of a value that is not of the type."""
    options = [option for part in _union(annotation) if get_origin(part) is Literal for option in get_args(part)]
    if not options:
        return f"must be {type_text(annotation)}, got {show(value)}"
    return not_one_of(value, [*options, *([None] if type(None) in _union(annotation) else [])])


def not_one_of(value: Any, options: list[Any]) -> str:
    """`'linfromer' is not one of linformer, performer; did you mean linformer?`"""
    words = [option if isinstance(option, str) else show(option) for option in options]
    end = nearest(value, words) if isinstance(value, str) else ""
    return f"{show(value)} is not one of {', '.join(words)}" + (f"; {end}" if end.startswith("did") else "")


def type_text(annotation: Any, metadata: tuple[Any, ...] = ()) -> str:
    """A type in words: `a whole number greater than 0 or null`."""
    for item in metadata:
        if isinstance(item, WrapValidator) and item.func.__doc__:
            return str(item.func.__doc__)
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return type_text(inner, (*metadata, *more))
    parts = _union(annotation)
    if len(parts) > 1:
        words = [type_text(part, metadata if part is not type(None) else ()) for part in parts]
        return " or ".join(dict.fromkeys(words))
    if get_origin(annotation) is Literal:
        return f"one of {', '.join(str(option) for option in get_args(annotation))}"
    if get_origin(annotation) in (tuple, list):
        inner = [type_text(part) for part in get_args(annotation) if part is not Ellipsis]
        return f"a list of {' and '.join(dict.fromkeys(inner))}"
    return _WORDS.get(annotation, getattr(annotation, "__name__", str(annotation))) + _range(metadata)


def _range(metadata: tuple[Any, ...]) -> str:
    words = []
    for item in metadata:
        # pydantic keeps the bounds of a Field in one piece there and in another here
        for bound in getattr(item, "metadata", [item]):
            words += [f"{sign} {getattr(bound, name)}" for kind, name, sign in _BOUNDS if isinstance(bound, kind)]
    return f" {' and '.join(words)}" if words else ""


def _union(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
