"""One reading of plain words for files, the command line and dumps: YAML 1.2's core, plus `1_000`."""

import re
from typing import Any

import yaml

_WORDS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_BASED = re.compile(r"[-+]?0(x[0-9a-fA-F_]+|o[0-7_]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_SPECIAL = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_LONGEST_NUMBER = 400


def resolve(word: str) -> Any:
    """What an unquoted word means: null, true, false, a number, or else itself.

    YAML 1.1, PyYAML's own reading, takes `1e-3` for text, `on` for true and `12:30` for 750.
    """
    lowered = word.lower()
    if lowered in _WORDS and word in (lowered, lowered.title(), lowered.upper()):
        return _WORDS[lowered]
    if lowered in _SPECIAL:
        return _SPECIAL[lowered]
    if len(word) > _LONGEST_NUMBER:
        return word
    if _INT.fullmatch(word):
        return int(word.replace("_", ""))
    if _BASED.fullmatch(word):
        return int(word.replace("_", ""), 0)
    if _FLOAT.fullmatch(word):
        return float(word.replace("_", ""))
    return word


class _Dumper(yaml.SafeDumper):
    """Lists in a line, text quoted wherever this or YAML 1.1's reading would take it for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: _Dumper, text: str) -> yaml.Node:
    style = None if isinstance(resolve(text), str) else "'"
    if not text.isprintable():
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _list(dumper: _Dumper, items: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def dump(data: Any) -> str:
    """YAML text in the order given, which reads back as the same data."""
    text: str = yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=float("inf"))
    return text


def show(value: Any) -> str:
    """A value in a sentence for people: short, on one line, as YAML would have it."""
    if isinstance(value, dict):
        return "a mapping" if value else "an empty mapping"
    words: dict[Any, str] = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    text = f"[{', '.join(map(show, value))}]" if isinstance(value, list | tuple) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
