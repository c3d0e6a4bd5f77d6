"""Settings as they were written, each with the place where it was written, and how one layer covers another."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from manyformer.config.run import TAGS

SettingPath = tuple[str | int, ...]


class SourceLocation(NamedTuple):
    """Where something was written: a line of a file, or a word of the command line (`typed`, whose key is `key`)."""

    file: str = ""
    line: int = 0
    column: int = 0
    typed: str = ""
    key: str = ""

    def sentence(self, path: str, what: str) -> str:
        """`FILE:LINE:COL: path: message`, or `--key value: message` with the path where it differs from the key."""
        middle = f"{path}: " if path and path != self.key else ""
        if self.typed:
            return f"{self.typed}: {middle}{what}"
        place = f"{self.file}:{self.line}:{self.column}: " if self.line else f"{self.file}: " if self.file else ""
        return f"{place}{middle}{what}"


class SettingError(NamedTuple):
    """Something to be mended: where it was written, the setting's dotted path, and what is wrong."""

    spot: SourceLocation
    path: str
    message: str

    def __str__(self) -> str:
        return self.spot.sentence(self.path, self.message)


@dataclass
class SettingLayer:
    """Nested settings, and the spot of each one by its path."""

    data: dict[str, Any] = field(default_factory=dict)
    locations: dict[SettingPath, SourceLocation] = field(default_factory=dict)

    def spot(self, path: SettingPath) -> SourceLocation:
        """The place of a setting, or of the nearest thing around it."""
        for length in range(len(path), -1, -1):
            if path[:length] in self.locations:
                return self.locations[path[:length]]
        return SourceLocation()

    def put(self, path: tuple[str, ...], value: Any, spots: dict[SettingPath, SourceLocation]) -> None:
        """Set the value at a path of one or two names, in place of what was there; `locations` are relative to the
        path.
        """
        at = self.data
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = value
        self.locations = {known: spot for known, spot in self.locations.items() if known[: len(path)] != path}
        self.locations |= {path + below: spot for below, spot in spots.items()}

    def below(self, path: SettingPath) -> dict[SettingPath, SourceLocation]:
        """The spots at and below a path, relative to it."""
        return {known[len(path) :]: spot for known, spot in self.locations.items() if known[: len(path)] == path}


def overlay(lower: SettingLayer, upper: SettingLayer) -> SettingLayer:
    """The upper layer's settings over the lower's, section by section.

    An upper layer that chooses another member of a union (another optimiser, another kind of data) starts from that
    member's defaults: nothing of the lower layer's section stays, so that no setting silently changes its meaning.
    """
    merged = SettingLayer({name: dict(part) if isinstance(part, dict) else part for name, part in lower.data.items()})
    merged.locations = dict(lower.locations)
    for name, part in upper.data.items():
        under = merged.data.get(name)
        if not isinstance(part, dict) or not isinstance(under, dict) or _switches(name, under, part):
            merged.put((name,), dict(part) if isinstance(part, dict) else part, upper.below((name,)))
            continue
        if (name,) in upper.locations:
            merged.locations[name,] = upper.locations[name,]
        for key, value in part.items():
            merged.put((name, key), value, upper.below((name, key)))
    if () in upper.locations:
        merged.locations[()] = upper.locations[()]
    return merged


def stack(layers: Iterable[SettingLayer]) -> SettingLayer:
    """All layers in one, the first at the bottom."""
    merged = SettingLayer()
    for layer in layers:
        merged = overlay(merged, layer)
    return merged


def _switches(section: str, under: dict[str, Any], over: dict[str, Any]) -> bool:
    if section not in TAGS:
        return False
    tag, usual = TAGS[section]
    before = under.get(tag, usual)
    return bool(over.get(tag, before) != before)
