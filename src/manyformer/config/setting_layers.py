"""Layers of settings with the source location of each setting, and how one layer overlays another."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from manyformer.config.data_sections import DATA_SECTIONS
from manyformer.config.run import UNION_TAGS
from manyformer.config.shipped import is_shipped

SettingPath = tuple[str | int, ...]


class SourceLocation(NamedTuple):
    """The source of a setting: a line of a file, or a command-line argument (`argument`, whose key is `key`)."""

    file: str = ""
    line: int = 0
    column: int = 0
    argument: str = ""
    key: str = ""

    def format_error(self, path: str, message: str) -> str:
        """`FILE:LINE:COL: path: message`, or `--key value: message` with the path if it differs from the key."""
        prefix = f"{path}: " if path and path != self.key else ""
        if self.argument:
            return f"{self.argument}: {prefix}{message}"
        if self.line:
            return f"{self.file}:{self.line}:{self.column}: {prefix}{message}"
        if self.file:
            return f"{self.file}: {prefix}{message}"
        return f"{prefix}{message}"


class SettingError(NamedTuple):
    """An error in a setting: its source location, its dotted path, and the message."""

    location: SourceLocation
    path: str
    message: str

    def __str__(self) -> str:
        return self.location.format_error(self.path, self.message)


@dataclass
class SettingLayer:
    """Nested settings, and the source location of each by its path."""

    data: dict[str, Any] = field(default_factory=dict)
    locations: dict[SettingPath, SourceLocation] = field(default_factory=dict)

    def location_of(self, path: SettingPath) -> SourceLocation:
        """The source location of a setting, or of the innermost enclosing section that has one."""
        # from the setting outwards: a file may locate its section alone
        for length in range(len(path), -1, -1):
            if path[:length] in self.locations:
                return self.locations[path[:length]]
        return SourceLocation()

    def put(self, path: tuple[str, ...], value: Any, locations: dict[SettingPath, SourceLocation]) -> None:
        """Set the value at a path of one or two names, replacing any other; `locations` are relative to the path."""
        section = self.data
        for name in path[:-1]:
            section = section.setdefault(name, {})
        section[path[-1]] = value
        # locations below the path belong to the value that is replaced
        elsewhere = {place: location for place, location in self.locations.items() if place[: len(path)] != path}
        self.locations = elsewhere | {path + relative: location for relative, location in locations.items()}

    def locations_below(self, path: SettingPath) -> dict[SettingPath, SourceLocation]:
        """The source locations at and below a path, relative to it."""
        depth = len(path)
        return {place[depth:]: location for place, location in self.locations.items() if place[:depth] == path}


def overlay(lower: SettingLayer, upper: SettingLayer) -> SettingLayer:
    """Overlay the lower layer's settings with the upper layer's, section by section.

    An upper layer that selects another member of a union (another optimizer, another kind of data) starts from that
    member's defaults: the lower layer's section is dropped, so that no setting silently changes its meaning. So does
    one that selects another variant of the same kind of data.
    """
    data = {name: dict(section) if isinstance(section, dict) else section for name, section in lower.data.items()}
    merged = SettingLayer(data, dict(lower.locations))
    for name, section in upper.data.items():
        lower_section = merged.data.get(name)
        if not isinstance(section, dict):
            merged.put((name,), section, upper.locations_below((name,)))
        elif not isinstance(lower_section, dict) or _selects_other_member(name, lower_section, section):
            merged.put((name,), dict(section), upper.locations_below((name,)))
        elif name == "data" and _selects_other_variant(lower_section, section):
            # the upper layer may leave the kind, which is the same, to the lower one
            merged.put((name,), {"kind": lower_section["kind"], **section}, upper.locations_below((name,)))
        else:
            if name == "data":
                _drop_paths_of_other_data(merged, upper)
            if (name,) in upper.locations:
                merged.locations[name,] = upper.locations[name,]
            for key, value in section.items():
                merged.put((name, key), value, upper.locations_below((name, key)))
    if () in upper.locations:
        merged.locations[()] = upper.locations[()]
    return merged


def _drop_paths_of_other_data(lower: SettingLayer, upper: SettingLayer) -> None:
    """Drop the held-out paths of a shipped run if a layer of the user names other data.

    They are files that the author of the shipped run had; a share of the data is held out instead, as by default."""
    if "path" not in upper.data["data"] or is_shipped(upper.location_of(("data", "path")).file):
        return
    for setting in ("valid", "test"):
        place = ("data", setting)
        is_path = isinstance(lower.data["data"].get(setting), str | list | tuple)
        if is_path and is_shipped(lower.location_of(place).file):
            del lower.data["data"][setting]
            lower.locations.pop(place, None)


def stack(layers: Iterable[SettingLayer]) -> SettingLayer:
    """Overlay all layers into one, the lowest first."""
    merged = SettingLayer()
    for layer in layers:
        merged = overlay(merged, layer)
    return merged


def _selects_other_member(section: str, lower: dict[str, Any], upper: dict[str, Any]) -> bool:
    tag, default = UNION_TAGS.get(section, ("", ""))
    member = lower.get(tag, default)
    return bool(upper.get(tag, member) != member)


def _selects_other_variant(lower: dict[str, Any], upper: dict[str, Any]) -> bool:
    kind = lower.get("kind")
    setting = None
    if isinstance(kind, str) and kind in DATA_SECTIONS:
        setting = DATA_SECTIONS[kind].variant_setting
    return setting is not None and setting in lower and bool(upper.get(setting, lower[setting]) != lower[setting])
