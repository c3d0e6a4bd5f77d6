"""Descriptions of all settings: rows for `--help`, and a JSON Schema for editors."""

import inspect
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from manyformer.config.data_sections import DATA_SECTIONS, DataSection
from manyformer.config.run import UNION_TAGS, RunConfig
from manyformer.config.section import ConfigSection
from manyformer.config.setting_names import section_members, tag_of
from manyformer.errors import format_value
from manyformer.keyword_checks import meaning_of, type_text


class SettingHelp(NamedTuple):
    """One line of help: the dotted key, its type in words, its default as YAML, and its description."""

    key: str
    type: str
    default: str
    doc: str


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


def describe_settings(run: RunConfig | None = None, signature: inspect.Signature | None = None) -> list[SettingHelp]:
    """Describe every setting of a run with this run's values as defaults, and the keywords of its recipe's signature.

    Without a run, the defaults of RunConfig are shown.
    """
    values = run if run is not None else RunConfig(recipe="?")
    rows: list[SettingHelp] = []
    for name, field in RunConfig.model_fields.items():
        value = getattr(values, name)
        if name == "model":
            rows += _keyword_rows(value, signature)
        elif isinstance(value, ConfigSection):
            rows += [
                _setting_row(f"{name}.{key}", inner_field, getattr(value, key))
                for key, inner_field in type(value).model_fields.items()
            ]
        else:
            rows.append(
                _setting_row(field.alias or name, field, "required" if run is None and field.is_required() else value)
            )
    return rows


def json_schema() -> dict[str, Any]:
    """A JSON Schema of run files, for completion and checking in editors."""
    schema = RunConfig.model_json_schema(mode="validation")
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"] = {
        "extends": {"type": "string", "description": "A shipped run or a file whose settings these are laid over."},
        **schema["properties"],
    }
    schema["anyOf"] = [{"required": [name]} for name in [*schema.pop("required"), "extends", "init_from"]]
    return schema


def _setting_row(key: str, field: FieldInfo, value: Any) -> SettingHelp:
    section, _, name = key.partition(".")
    type_description = type_text(field.annotation, tuple(field.metadata))
    if section in UNION_TAGS and name == UNION_TAGS[section][0]:
        type_description = f"one of {', '.join(tag_of(member, name) for member in section_members(section))}"
    elif section == "data" and (variants := _variants(name)):
        type_description = f"one of {', '.join(variants)}"
    return SettingHelp(key, type_description, _default_text(value), " ".join(str(field.description or "").split()))


def _variants(setting: str) -> dict[str, type[DataSection]]:
    """The variants that a data setting selects; none if it selects none."""
    kinds = DATA_SECTIONS.values()
    return next((section.variants for section in kinds if section.variant_setting == setting), {})


def _keyword_rows(values: Mapping[str, Any], signature: inspect.Signature | None) -> list[SettingHelp]:
    rows = []
    for keyword in describe_keywords(signature) if signature else []:
        value = values.get(keyword.name, keyword.default)
        default = "required"
        if value is not inspect.Parameter.empty:
            default = _default_text(value)
        rows.append(SettingHelp(f"model.{keyword.name}", keyword.type, default, keyword.meaning))
    return rows


def _default_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return format_value(value)
