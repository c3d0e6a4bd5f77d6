"""The settings for people and editors: rows for `--help`, and a JSON Schema."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from manyformer.config.keywords import type_text
from manyformer.config.run import TAGS, RunConfig
from manyformer.config.section import ConfigSection
from manyformer.config.setting_names import SECTIONS, tag_of
from manyformer.config.yaml_scalars import show


class SettingHelp(NamedTuple):
    """One line of help: the dotted key, its type in words, its default as YAML, and what it means."""

    key: str
    type: str
    default: str
    doc: str


def describe_settings(
    run: RunConfig | None = None, signature: inspect.Signature | None = None, docs: Mapping[str, str] | None = None
) -> list[SettingHelp]:
    """Every setting of a run with this run's values as defaults, and its recipe's keywords by the signature.

    `docs` explains keywords of the recipe, whose signature cannot. Without a run: the record's own defaults.
    """
    values = run if run is not None else RunConfig(recipe="?")
    rows: list[SettingHelp] = []
    for name, field in RunConfig.model_fields.items():
        value = getattr(values, name)
        if name == "model":
            rows += _keywords(value, signature, docs or {})
        elif isinstance(value, ConfigSection):
            rows += [
                _row(f"{name}.{key}", inner, getattr(value, key)) for key, inner in type(value).model_fields.items()
            ]
        else:
            rows.append(_row(name, field, "required" if run is None and field.is_required() else value))
    return rows


def json_schema() -> dict[str, Any]:
    """A JSON Schema of run files, for completion and checking in editors."""
    schema = RunConfig.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"] = {
        "extends": {"type": "string", "description": "A shipped run or a file whose settings these are laid over."},
        **schema["properties"],
    }
    schema["anyOf"] = [{"required": [name]} for name in [*schema.pop("required"), "extends"]]
    return schema


def _row(key: str, field: FieldInfo, value: Any) -> SettingHelp:
    section, _, name = key.partition(".")
    words = type_text(field.annotation, tuple(field.metadata))
    if section in TAGS and name == TAGS[section][0]:
        words = f"one of {', '.join(tag_of(member, name) for member in SECTIONS[section])}"
    return SettingHelp(key, words, _shown(value), " ".join(str(field.description or "").split()))


def _keywords(
    given: Mapping[str, Any], signature: inspect.Signature | None, docs: Mapping[str, str]
) -> list[SettingHelp]:
    rows = []
    for name, parameter in (signature.parameters if signature else {}).items():
        value = given.get(name, parameter.default)
        default = "required" if value is inspect.Parameter.empty else _shown(value)
        words = "" if parameter.annotation is inspect.Parameter.empty else type_text(parameter.annotation)
        rows.append(SettingHelp(f"model.{name}", words, default, docs.get(name, "")))
    return rows


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else show(value)
