"""Plain YAML scalars for files, the command line and dumps: YAML 1.2's core schema, plus `1_000`."""

import re
from typing import Any

import yaml

_CONSTANTS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_HEX_OR_OCTAL = re.compile(r"[-+]?0(x[0-9a-fA-F_]+|o[0-7_]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NON_FINITE = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_MAX_NUMBER_LENGTH = 400


def resolve_scalar(text: str) -> Any:
    """Resolve an unquoted scalar: null, true, false, a number, or else the text itself.

    YAML 1.1, PyYAML's own reading, takes `1e-3` for text, `on` for true and `12:30` for 750.
    """
    lowered = text.lower()
    if lowered in _CONSTANTS and text in (lowered, lowered.title(), lowered.upper()):
        return _CONSTANTS[lowered]
    if lowered in _NON_FINITE:
        return _NON_FINITE[lowered]
    if len(text) > _MAX_NUMBER_LENGTH:
        return text
    if _INT.fullmatch(text):
        return int(text.replace("_", ""))
    if _HEX_OR_OCTAL.fullmatch(text):
        return int(text.replace("_", ""), 0)
    if _FLOAT.fullmatch(text):
        return float(text.replace("_", ""))
    return text


class _Dumper(yaml.SafeDumper):
    """Dumps lists in one line and quotes text that this schema or YAML 1.1 would resolve to something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None if isinstance(resolve_scalar(text), str) else "'"
    if not text.isprintable():
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_list(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _represent_text)
_Dumper.add_representer(list, _represent_list)


def dump_yaml(data: Any) -> str:
    """Dump data as YAML in its order of keys; it reads back as the same data."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    return text
