"""Reading a YAML run file so that every setting knows its line and column, and every mistake is a sentence."""

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any, NamedTuple

import yaml
from yaml.reader import Reader

from manyformer.config.setting_layers import SettingError, SettingLayer, SettingPath, SourceLocation
from manyformer.config.setting_names import SECTIONS
from manyformer.config.yaml_scalars import resolve, show
from manyformer.errors import UserError

_LARGEST_FILE = 1 << 20
_DEEPEST = 20
_SECTIONS = frozenset(SECTIONS) | {"model"}
# What PyYAML says, what to say instead, and whether the place of the context is the better one.
_PROBLEMS = (
    ("found character '\\t'", "a tab stands here; YAML is indented with spaces", False),
    ("could not find expected ':'", "a colon is missing after this name; write `name: value`", True),
    (
        "mapping values are not allowed",
        "this colon does not fit: the line before lacks one, the indentation is wrong, or text needs quotes",
        False,
    ),
    ("expected <block end>", "does not line up with the lines before it; check the indentation", False),
    ("expected ',' or ']'", "this list is not closed with ]", True),
    ("expected ',' or '}'", "this mapping is not closed with }", True),
    ("found unexpected end of stream", "this quotation mark is not closed", True),
    ("that cannot start any token", "text that begins with this sign must be quoted", False),
)


class RunFile(NamedTuple):
    """One run file: its settings, the file that it extends, and what is wrong with it as YAML."""

    layer: SettingLayer
    extends: str | None
    mistakes: list[SettingError]


def read_run_file(path: FilePath) -> RunFile:
    """The settings in a file. Raises UserError where it cannot be read at all."""
    data, mistakes = read_mapping(path, "a run file names at least a recipe", "`recipe: transformer-lm`")
    return as_run_file(data, mistakes)


def read_mapping(path: FilePath, least: str, example: str) -> tuple[SettingLayer, list[SettingError]]:
    """The mapping in a YAML file, and what is wrong with it; `least` and `example` say what is missing in an empty one.

    Raises UserError where it cannot be read at all.
    """
    composer = LocatedYAML(str(path))
    data = composer.compose(_text(path))
    mistakes = composer.mistakes
    start = SourceLocation(str(path), 1, 1)
    if data is None and not mistakes:
        mistakes = [SettingError(start, "", f"is empty; {least}, as {example}")]
    elif not isinstance(data, dict) and not mistakes:
        what = f"must be a mapping of settings, such as {example}, not {show(data)}"
        mistakes = [SettingError(composer.spots.get((), start), "", what)]
    composer.spots[()] = start
    return SettingLayer(data if isinstance(data, dict) else {}, composer.spots), mistakes


def as_run_file(layer: SettingLayer, mistakes: list[SettingError]) -> RunFile:
    """The settings of a run, and what they extend, out of a mapping."""
    layer = SettingLayer({name: _section(name, part) for name, part in layer.data.items()}, layer.locations)
    extends = layer.data.pop("extends", None)
    if extends is not None and not isinstance(extends, str):
        what = f"must be the name of a shipped run or a path, not {show(extends)}"
        mistakes = [*mistakes, SettingError(layer.spot(("extends",)), "extends", what)]
        extends = None
    return RunFile(layer, extends, mistakes)


def _section(name: str, part: Any) -> Any:
    """A section that is left empty is a section all the same."""
    return {} if part is None and name in _SECTIONS else part


def parse_value(text: str) -> Any:
    """The value of an override: quotes, [lists] and {mappings} as in YAML, anything else one plain word.

    Raises UserError where the YAML is broken.
    """
    text = text.strip()
    if not text.startswith(("[", "{", "'", '"')):
        return resolve(text)
    composer = LocatedYAML("")
    value = composer.compose(text)
    if composer.mistakes:
        raise UserError(composer.mistakes[0].message)
    return value


class _Deep(Exception):
    """The nesting is too deep to be meant."""


class LocatedYAML:
    """Plain data out of YAML text, with the spot of every key and every list item."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.spots: dict[SettingPath, SourceLocation] = {}
        self.mistakes: list[SettingError] = []

    def compose(self, text: str) -> Any:
        """The only document in the text, None where there is none or it is broken; mistakes are collected."""
        bad = Reader.NON_PRINTABLE.search(text)
        if bad:
            line, column = text.count("\n", 0, bad.start()) + 1, bad.start() - text.rfind("\n", 0, bad.start())
            what = f"holds a character that does not belong into text (U+{ord(bad.group()):04X})"
            self.mistakes.append(SettingError(SourceLocation(self.file, line, column), "", what))
            return None
        try:
            return self._document(yaml.parse(text, Loader=yaml.SafeLoader))
        except yaml.MarkedYAMLError as error:
            self._broken(error)
            return None
        except _Deep:
            self.mistakes.append(
                SettingError(SourceLocation(self.file, 1, 1), "", "is nested too deeply for a run file")
            )
            return None

    def _document(self, events: Iterator[yaml.Event]) -> Any:
        value, documents = None, 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._mistake(event, (), "a second document starts here; a run file is one")
                    break
            elif isinstance(event, yaml.NodeEvent):
                self.spots[()] = self._spot(event)
                value = self._value(event, events, ())
        return value

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], path: SettingPath) -> Any:
        if len(path) > _DEEPEST:
            raise _Deep
        if isinstance(event, yaml.AliasEvent):
            self._mistake(event, path, f"*{event.anchor} refers to another place, which run files cannot; use extends")
            return None
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag not in (None, "!"):
            self._mistake(event, path, f"the tag {event.tag} is not for run files; leave it out, quote what is text")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(events, path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(events, path)
        assert isinstance(event, yaml.ScalarEvent)
        return event.value if event.style else resolve(event.value)

    def _mapping(self, events: Iterator[yaml.Event], path: SettingPath) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            key = self._value(event, events, (*path, "?"))
            value_event = next(events)
            if not isinstance(key, str):
                self._mistake(event, path, f"a setting's name must be text, not {show(key)}")
                self._value(value_event, events, (*path, "?"))
                continue
            spot = self._spot(event)
            if key in found:
                what = f"is given twice, first in line {self.spots[*path, key].line}"
                self.mistakes.append(SettingError(spot, _dotted((*path, key)), what))
                self._value(value_event, events, (*path, "?"))
                continue
            self.spots[*path, key] = spot
            found[key] = self._value(value_event, events, (*path, key))
        return found

    def _sequence(self, events: Iterator[yaml.Event], path: SettingPath) -> list[Any]:
        items: list[Any] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            self.spots[*path, len(items)] = self._spot(event)
            items.append(self._value(event, events, (*path, len(items))))
        return items

    def _spot(self, event: yaml.Event) -> SourceLocation:
        mark = event.start_mark
        assert mark is not None, "events that are parsed from text know their place"
        return SourceLocation(self.file, mark.line + 1, mark.column + 1)

    def _mistake(self, event: yaml.Event, path: SettingPath, what: str) -> None:
        self.mistakes.append(SettingError(self._spot(event), _dotted(path), what))

    def _broken(self, error: yaml.MarkedYAMLError) -> None:
        problem = str(error.problem)
        marks = [error.problem_mark, error.context_mark]
        what = f"is not YAML: {problem}"
        for words, better, at_context in _PROBLEMS:
            if words in problem:
                what = better
                marks = marks[::-1] if at_context else marks
                break
        spot = SourceLocation(self.file, 1, 1)
        for mark in reversed(marks):
            spot = SourceLocation(self.file, mark.line + 1, mark.column + 1) if mark else spot
        self.mistakes.append(SettingError(spot, "", what))


def _text(path: FilePath) -> str:
    try:
        if path.stat().st_size > _LARGEST_FILE:
            raise UserError(f"{path}: is too large for a run file (data is named by data.path)")
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = raw[: error.start].decode("utf-8", errors="replace")
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        what = f"is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; save the file as UTF-8"
        raise UserError(f"{path}:{line}:{column}: {what}") from error


def _dotted(path: SettingPath) -> str:
    return ".".join(str(name) for name in path if name != "?")
