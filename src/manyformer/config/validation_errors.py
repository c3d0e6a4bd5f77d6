"""Validating merged settings: every mistake of every section in one go, in sentences for people."""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from manyformer.config.keywords import check_keyword, not_one_of
from manyformer.config.run import TAGS, RunConfig
from manyformer.config.setting_layers import SettingError, SettingLayer, SettingPath
from manyformer.config.setting_names import SECTIONS, known_settings, suggest, tag_of
from manyformer.config.yaml_scalars import show

_TYPES = {
    "int_type": "a whole number",
    "int_parsing_size": "a smaller whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "finite_number": "a finite number",
    "tuple_type": "a list",
    "list_type": "a list",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_NOT_A_MAPPING = ("model_type", "model_attributes_type", "dict_type")


def validate(
    layer: SettingLayer, signature: inspect.Signature | None, told: Iterable[str] = ()
) -> tuple[RunConfig | None, list[SettingError]]:
    """The run, or None and every mistake in it.

    pydantic compares settings with one another only once each is right by itself, so what is wrong is reported, taken
    out and validated again; a conflict with a setting that was taken out says nothing and stays unsaid. So does what
    is wrong with the paths in `told`, of which people were told before.
    """
    data = {name: dict(part) if isinstance(part, dict) else part for name, part in layer.data.items()}
    known = known_settings(data, signature)
    mistakes = _check_model(data, layer, signature, known)
    gone = set(told)
    while True:
        before = set(gone)
        try:
            run = RunConfig.model_validate(data)
            return (None if mistakes else run), mistakes
        except ValidationError as error:
            for details in error.errors():
                path = _path(details)
                if not _moot(details, path, gone):
                    mistakes.append(_mistake(details, path, layer, known))
                gone.add(_take_out(data, path, missing=details["type"] == "missing"))
        if gone == before:
            return None, mistakes


def _check_model(
    data: dict[str, Any], layer: SettingLayer, signature: inspect.Signature | None, known: list[str]
) -> list[SettingError]:
    given = data.get("model")
    if signature is None or not isinstance(given, dict):
        return []
    mistakes = []
    for name, value in list(given.items()):
        given[name], what = check_keyword(name, value, signature, known)
        if what:
            mistakes.append(SettingError(layer.spot(("model", name)), f"model.{name}", what))
            del given[name]
    return mistakes


def _path(details: ErrorDetails) -> SettingPath:
    """The path as it is written in a file: without the member of a union, and at most to a section's setting."""
    path = tuple(details["loc"])
    if len(path) > 1 and path[0] in TAGS and path[1] in _tags(str(path[0])):
        path = path[:1] + path[2:]
    if details["type"] == "union_tag_invalid":
        path = (*path, TAGS[str(path[0])][0])
    return path


def _tags(section: str) -> list[str]:
    return [tag_of(member, TAGS[section][0]) for member in SECTIONS[section]]


def _moot(details: ErrorDetails, path: SettingPath, gone: set[str]) -> bool:
    if details["type"] != "conflict":
        return _dotted(path[:2]) in gone or str(path[0]) in gone
    involved = [_dotted(path), *details["ctx"]["involves"]]
    return any(
        name == lost or name.startswith(f"{lost}.") or lost.startswith(f"{name}.") for name in involved for lost in gone
    )


def _take_out(data: dict[str, Any], path: SettingPath, *, missing: bool) -> str:
    section = str(path[0])
    inside = len(path) > 1 and isinstance(data.get(section), dict)
    home, name = (data[section], str(path[1])) if inside else (data, section)
    if missing:
        home[name] = "?"
    elif inside and section in TAGS and name == TAGS[section][0]:
        # Which member was meant is unknown, so its settings cannot be judged.
        del data[section]
        return section
    else:
        home.pop(name, None)
    return _dotted(path[:2])


def _mistake(details: ErrorDetails, path: SettingPath, layer: SettingLayer, known: list[str]) -> SettingError:
    spot = layer.spot(path)
    if details["type"] == "missing" and len(path) > 1 and path[0] in TAGS:
        spot = layer.locations.get(path[:1]) or layer.spot((path[0], TAGS[str(path[0])][0]))
    shown = tuple(name for name in path if isinstance(name, str))
    return SettingError(spot, _dotted(shown), sentence(details, path, known))


def sentence(details: ErrorDetails, path: SettingPath, known: list[str]) -> str:
    """What is wrong, as pydantic found it, for people; `known` are the settings there are."""
    kind, value, ctx = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return f"no such setting; {suggest(_dotted(path), known)}"
    if kind == "missing":
        return f"is missing; {_help(path)}"
    if kind == "conflict":
        return str(ctx["what"])
    if kind == "forms":
        return f"must be {ctx['forms']}, got {show(value)}"
    if kind == "literal_error":
        return not_one_of(value, _quoted(ctx["expected"]))
    if kind == "union_tag_invalid":
        return not_one_of(value[path[-1]], _quoted(ctx["expected_tags"]))
    if kind in _NOT_A_MAPPING:
        return _not_a_mapping(value, str(path[0]))
    if kind in _TYPES:
        return f"must be {_TYPES[kind]}, got {show(value)}"
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"must be {words} {ctx[key]:g}, got {show(value)}"
    if kind == "string_type":
        quote = f"; for text write '{value}'" if isinstance(value, int | float) and not isinstance(value, bool) else ""
        return f"must be text, got {show(value)}{quote}"
    if kind == "string_too_short":
        return "must not be empty"
    return f"{details['msg'][:1].lower()}{details['msg'][1:]}, got {show(value)}"


def _not_a_mapping(value: Any, section: str) -> str:
    tag = TAGS[section][0] if section in TAGS else ""
    what = f"must be a mapping of settings, got {show(value)}"
    if section == "data" and isinstance(value, str) and value not in _tags(section):
        return f"{what}; did you mean data.path?"
    return f"{what}; did you mean {section}.{tag}?" if tag and isinstance(value, str) else what


def _help(path: SettingPath) -> str:
    for member in (RunConfig,) if len(path) == 1 else SECTIONS[str(path[0])]:
        field = member.model_fields.get(str(path[-1]))
        if field is not None and field.is_required():
            doc = " ".join(str(field.description).split())
            return f"it is {doc[0].lower()}{doc[1:].rstrip('.')}"
    return "it has no default"


def _quoted(expected: str) -> list[Any]:
    return re.findall(r"'([^']*)'", expected)


def _dotted(path: SettingPath) -> str:
    return ".".join(str(name) for name in path)
