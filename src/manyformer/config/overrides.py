"""Settings on the command line: `key=value`, `--key value` and `--key=value` mean the same, and so do `-` and `_`."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from manyformer.config.run import RunConfig
from manyformer.config.run_file import parse_value
from manyformer.config.setting_layers import SettingError, SettingLayer, SettingPath, SourceLocation, overlay
from manyformer.config.setting_names import SECTIONS, known_settings, leaf, suggest
from manyformer.config.yaml_scalars import show
from manyformer.errors import UserError


class SettingOverride(NamedTuple):
    """One setting from the command line, its key with underscores."""

    key: str
    value: Any
    spot: SourceLocation


def parse_overrides(given: Sequence[str] | Mapping[str, Any]) -> tuple[list[SettingOverride], list[SettingError]]:
    """The settings in the words of a command line (or in a mapping, from Python), and what cannot be read of them."""
    if isinstance(given, Mapping):
        plain = {key: str(value) if isinstance(value, PurePath) else value for key, value in given.items()}
        return [_override(key, value, show(value)) for key, value in plain.items()], []
    found: list[SettingOverride] = []
    mistakes: list[SettingError] = []
    words = list(given)
    while words:
        word = words.pop(0)
        key, equals, text = word.removeprefix("--").partition("=")
        if not equals and word.startswith("--") and words and not words[0].startswith("--"):
            equals, text = "=", words.pop(0)
        if not equals or not key.strip():
            dashed = word.startswith("--") and key
            what = f"needs a value, as in `{word} true`" if dashed else "is no setting; write key=value or --key value"
            mistakes.append(SettingError(SourceLocation(typed=word), "", what))
            continue
        try:
            found.append(_override(key, parse_value(text), text))
        except UserError as error:
            mistakes.append(SettingError(_spot(key, text), "", str(error)))
    return found, mistakes


def place_overrides(
    overrides: Sequence[SettingOverride], base: SettingLayer, signature: inspect.Signature | None
) -> tuple[SettingLayer, list[SettingError]]:
    """One layer of all overrides, later ones over earlier ones, with bare model keywords put where they belong."""
    layer, mistakes = SettingLayer(), list[SettingError]()
    dotted = [override for override in overrides if "." in override.key or override.key in RunConfig.model_fields]
    # The dotted ones choose the members of unions, and so decide which settings a bare keyword could mean.
    settings = SettingLayer()
    for override in dotted:
        _put(settings, override.key, override)
    chosen = overlay(base, settings).data
    known = known_settings(chosen, signature)
    for override in overrides:
        key, what = (override.key, "") if override in dotted else _short(override.key, known, signature)
        head, _, rest = key.partition(".")
        if not what and rest and (head not in {*SECTIONS, "model"} or "." in rest):
            what = f"no such setting; {suggest(key, known)}"
        if what:
            mistakes.append(SettingError(override.spot, override.key, what))
        else:
            _put(layer, key, override)
    return layer, mistakes


def _short(key: str, known: list[str], signature: inspect.Signature | None) -> tuple[str, str]:
    """The full name that a bare key stands for, or what is wrong with it."""
    keyword = f"model.{key}"
    others = [name for name in known if leaf(name) == key and name != keyword]
    if signature is None:
        # Without a recipe nobody knows its keywords; only what is certainly another setting is a mistake.
        return keyword, f"no such setting; {suggest(key, known)}" if others else ""
    if keyword not in known:
        return "", f"no such setting; {suggest(key, known)}"
    if others:
        return "", f"could mean {' or '.join([keyword, *others])}; write one of them"
    return keyword, ""


def _put(layer: SettingLayer, key: str, override: SettingOverride) -> None:
    path = tuple(key.split(".")[:2])
    spots: dict[SettingPath, SourceLocation] = {(): override.spot}
    value = override.value
    if len(path) == 1 and (path[0] in SECTIONS or path[0] == "model"):
        if value is None:
            return
        if isinstance(value, dict):
            for name, part in value.items():
                layer.put((path[0], name), part, spots)
            return
    if len(path) == 2 and not isinstance(layer.data.get(path[0], {}), dict):
        return
    layer.put(path, value, spots)


def _override(key: str, value: Any, text: str) -> SettingOverride:
    spot = _spot(key, text)
    return SettingOverride(spot.key, value, spot)


def _spot(key: str, text: str) -> SourceLocation:
    quoted = f"'{text}'" if not text or any(sign.isspace() for sign in text) else text
    key = key.strip()
    return SourceLocation(typed=f"--{key} {quoted}", key=key.replace("-", "_"))
