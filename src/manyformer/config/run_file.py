"""YAML run files: read with the line and column of every setting, written with all defaults, and compared.

Plain scalars are those of YAML 1.2's core schema, plus `1_000`, in files and on the command line."""

import json
import re
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import yaml
from yaml.reader import Reader

from manyformer.base.errors import UserError, format_value
from manyformer.config.run import UNION_TAGS, RunConfig
from manyformer.config.setting_layers import SettingError, SettingLayer, SettingPath, SourceLocation
from manyformer.config.setting_names import SECTIONS
from manyformer.config.training_sections import NoamSchedule

_MAX_FILE_BYTES = 1 << 20
_MAX_DEPTH = 20
MAX_SETTINGS = 300
"""The most names in one mapping, and letters of a name: several times as many as the longest run has."""
_SECTIONS = SECTIONS | {"model"}
_CONSTANTS: dict[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_HEX_OR_OCTAL = re.compile(r"[-+]?0(x[0-9a-fA-F_]+|o[0-7_]+)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?")
_NON_FINITE = {".inf": float("inf"), "+.inf": float("inf"), "-.inf": float("-inf"), ".nan": float("nan")}
_MAX_NUMBER_LENGTH = 400
# PyYAML's message, the replacement, and whether the location of the context is the better one.
_YAML_PROBLEMS = (
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

_FREE = {"activation_checkpointing", "device", "devices", "limits", "log", "out", "process_timeout", "save", "strategy"}
FREE_ON_RESUME = frozenset(
    _FREE
    | {
        "batch.ahead",
        "evaluate.batches",
        "evaluate.every",
        "evaluate.patience",
        "evaluate.target",
        "import",
        "trackers",
    }
)
"""Settings that may change when an interrupted run is resumed: they decide when the run ends, what is saved and logged,
and on which devices it is computed, but not what the model learns."""


def read_run_file(path: FilePath, errors: list[SettingError]) -> tuple[SettingLayer, str | None]:
    """Read the settings in a file and the name of the file that it extends; YAML errors are added to `errors`.

    Raises UserError if the file cannot be read.
    """
    requirement = "a run file names at least a recipe"
    example = "`recipe: transformer-lm`"
    return split_extends(read_mapping(path, requirement, example, errors), errors)


def read_mapping(path: FilePath, requirement: str, example: str, errors: list[SettingError]) -> SettingLayer:
    """Read the mapping in a YAML file; `requirement` and `example` are for the message of an empty file.

    YAML errors are added to `errors`. Raises UserError if the file cannot be read.
    """
    composer = LocatedYAML(str(path))
    data = composer.compose(_read_text(path))
    errors += composer.errors
    file_start = SourceLocation(str(path), 1, 1)
    if data is None and not composer.errors:
        errors.append(SettingError(file_start, "", f"is empty; {requirement}, as {example}"))
    elif not isinstance(data, dict) and not composer.errors:
        message = f"must be a mapping of settings, such as {example}, not {format_value(data)}"
        errors.append(SettingError(composer.locations.get((), file_start), "", message))
    composer.locations[()] = file_start
    return SettingLayer(data if isinstance(data, dict) else {}, composer.locations)


def split_extends(layer: SettingLayer, errors: list[SettingError]) -> tuple[SettingLayer, str | None]:
    """Split a mapping into the settings of a run and the name of the file that it extends."""
    # an empty section is an empty mapping, not null
    settings = {name: {} if part is None and name in _SECTIONS else part for name, part in layer.data.items()}
    extends = settings.pop("extends", None)
    if extends is not None and not isinstance(extends, str):
        message = f"must be the name of a shipped run or a path, not {format_value(extends)}"
        errors.append(SettingError(layer.location_of(("extends",)), "extends", message))
        extends = None
    return SettingLayer(settings, layer.locations), extends


def parse_value(text: str) -> Any:
    """Parse the value of an override: quotes, [lists] and {mappings} as in YAML, anything else as one plain scalar.

    Raises UserError for invalid YAML.
    """
    text = text.strip()
    if not text.startswith(("[", "{", "'", '"')):
        return resolve_scalar(text)
    composer = LocatedYAML("")
    value = composer.compose(text)
    if composer.errors:
        raise UserError(composer.errors[0].message)
    return value


class _TooLarge(Exception):
    """The nesting exceeds `_MAX_DEPTH`, or the settings `MAX_SETTINGS`; the message says which."""


class LocatedYAML:
    """Composes plain data from YAML text and records the location of every key and list item."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.locations: dict[SettingPath, SourceLocation] = {}
        self.errors: list[SettingError] = []

    def compose(self, text: str) -> Any:
        """The only document in the text, None if there is none or it is invalid; errors are collected."""
        # first, because PyYAML reports such a character without its line
        match = Reader.NON_PRINTABLE.search(text)
        if match:
            line = text.count("\n", 0, match.start()) + 1
            column = match.start() - text.rfind("\n", 0, match.start())
            message = f"holds a character that does not belong into text (U+{ord(match.group()):04X})"
            self.errors.append(SettingError(SourceLocation(self.file, line, column), "", message))
            return None
        try:
            return self._document(yaml.parse(text, Loader=yaml.SafeLoader))
        except yaml.MarkedYAMLError as error:
            self._add_yaml_error(error)
            return None
        except _TooLarge as error:
            self.errors.append(SettingError(SourceLocation(self.file, 1, 1), "", str(error)))
            return None
        except (OverflowError, ValueError):
            message = "holds an escape, such as \\UFFFFFFFF, that is no character"
            self.errors.append(SettingError(SourceLocation(self.file, 1, 1), "", message))
            return None

    def _document(self, events: Iterator[yaml.Event]) -> Any:
        value = None
        documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                documents += 1
                if documents > 1:
                    self._add_error(event, (), "a second document starts here; a run file is one")
                    break
            elif isinstance(event, yaml.NodeEvent):
                self.locations[()] = self._location(event)
                value = self._value(event, events, ())
        return value

    def _value(self, event: yaml.Event, events: Iterator[yaml.Event], path: SettingPath) -> Any:
        if len(path) > _MAX_DEPTH:
            raise _TooLarge("is nested too deeply for a run file")
        if isinstance(event, yaml.AliasEvent):
            message = f"*{event.anchor} refers to another place, which run files cannot; use extends"
            self._add_error(event, path, message)
            return None
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag not in (None, "!"):
            self._add_error(event, path, f"the tag {event.tag} is not for run files; leave it out, quote what is text")
        if isinstance(event, yaml.MappingStartEvent):
            return self._mapping(events, path)
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(events, path)
        assert isinstance(event, yaml.ScalarEvent)
        # quoted text is text, whatever it looks like
        if event.style:
            return event.value
        return resolve_scalar(event.value)

    def _mapping(self, events: Iterator[yaml.Event], path: SettingPath) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for event in events:
            if isinstance(event, yaml.MappingEndEvent):
                break
            # a key may be any node of YAML; its place is that of no setting
            key = self._value(event, events, (*path, "?"))
            value_event = next(events)
            if not isinstance(key, str):
                self._add_error(event, path, f"a setting's name must be text, not {format_value(key)}")
                self._value(value_event, events, (*path, "?"))
                continue
            if len(key) > MAX_SETTINGS:
                raise _TooLarge(f"has a setting whose name has more than {MAX_SETTINGS} letters")
            if len(mapping) >= MAX_SETTINGS:
                raise _TooLarge(f"has more than {MAX_SETTINGS} settings in one section")
            location = self._location(event)
            if key in mapping:
                message = f"is given twice, first in line {self.locations[*path, key].line}"
                self.errors.append(SettingError(location, _dotted((*path, key)), message))
                self._value(value_event, events, (*path, "?"))
                continue
            self.locations[*path, key] = location
            mapping[key] = self._value(value_event, events, (*path, key))
        return mapping

    def _sequence(self, events: Iterator[yaml.Event], path: SettingPath) -> list[Any]:
        items: list[Any] = []
        for event in events:
            if isinstance(event, yaml.SequenceEndEvent):
                break
            self.locations[*path, len(items)] = self._location(event)
            items.append(self._value(event, events, (*path, len(items))))
        return items

    def _location(self, event: yaml.Event) -> SourceLocation:
        mark = event.start_mark
        assert mark is not None, "events parsed from text have a start mark"
        return SourceLocation(self.file, mark.line + 1, mark.column + 1)

    def _add_error(self, event: yaml.Event, path: SettingPath, message: str) -> None:
        self.errors.append(SettingError(self._location(event), _dotted(path), message))

    def _add_yaml_error(self, error: yaml.MarkedYAMLError) -> None:
        clear_texts = ((text, at_context) for part, text, at_context in _YAML_PROBLEMS if part in str(error.problem))
        message, at_context = next(clear_texts, (f"is not YAML: {error.problem}", False))
        if at_context:
            marks = [error.context_mark, error.problem_mark]
        else:
            marks = [error.problem_mark, error.context_mark]
        line, column = next(((mark.line + 1, mark.column + 1) for mark in marks if mark), (1, 1))
        self.errors.append(SettingError(SourceLocation(self.file, line, column), "", message))


def _read_text(path: FilePath) -> str:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise UserError(f"{path}: is too large for a run file (data is named by data.path)")
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        # editors on Windows begin a file with a mark of the byte order
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        preceding = raw[: error.start].decode("utf-8", errors="replace")
        line = preceding.count("\n") + 1
        column = len(preceding) - preceding.rfind("\n")
        problem = f"is not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; save the file as UTF-8"
        raise UserError(f"{path}:{line}:{column}: {problem}") from error


def _dotted(path: SettingPath) -> str:
    return ".".join(str(name) for name in path if name != "?")


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
    # without quotes it would be read as a number, a constant or null
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


def dump_run(run: RunConfig) -> str:
    """The run as YAML with all defaults, so that it reads back equal even if a default changes."""
    return dump_yaml(run.model_dump(mode="json", by_alias=True))


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """The settings that differ between two runs, except those in FREE_ON_RESUME, as `optim.lr: 0.1, now 0.2`.

    If the member of a union has changed (another optimizer), only that is reported.
    """
    old_settings = _flatten(old)
    new_settings = _flatten(new)
    # the settings of another optimizer differ all at once: its name says as much
    for section, (tag, _) in UNION_TAGS.items():
        if old_settings[f"{section}.{tag}"] != new_settings[f"{section}.{tag}"]:
            old_settings, new_settings = (
                _without_members(settings, section, tag) for settings in (old_settings, new_settings)
            )
    return [
        f"{name}: {old_settings.get(name, 'not given')}, now {new_settings.get(name, 'not given')}"
        for name in dict.fromkeys([*old_settings, *new_settings])
        if old_settings.get(name) != new_settings.get(name)
        and FREE_ON_RESUME.isdisjoint({name, name.partition(".")[0]})
    ]


def _without_members(settings: dict[str, str], section: str, tag: str) -> dict[str, str]:
    tag_setting = f"{section}.{tag}"
    return {name: text for name, text in settings.items() if name == tag_setting or not name.startswith(f"{section}.")}


def _flatten(run: RunConfig) -> dict[str, str]:
    flat: dict[str, Any] = {}
    schedule = run.schedule
    if isinstance(schedule, NoamSchedule):
        # The warm-up scales the whole schedule; an unset one follows from the limits, which may change.
        run = run.model_copy(update={"schedule": schedule.model_copy(update={"warmup": run.warmup})})
    for name, part in run.model_dump(mode="json", by_alias=True).items():
        if isinstance(part, dict):
            flat |= {f"{name}.{key}": value for key, value in part.items()}
        else:
            flat[name] = part
    return {name: json.dumps(value, sort_keys=True, ensure_ascii=False) for name, value in flat.items()}
