"""The paths that the settings of a run name: all are looked at before anything is prepared."""

import os
from collections.abc import Iterator
from pathlib import Path

from manyformer.config import DataSection
from manyformer.data.hub import is_hub_dataset
from manyformer.data.pair_tables import NORMALIZATION_CORPUS
from manyformer.data.piped_input import STDIN
from manyformer.data.splits import path_list
from manyformer.data.text_files import existing_path
from manyformer.data.text_sources import STDLIB
from manyformer.errors import UserError, UserErrors

_SETTINGS = ("path", "valid", "test")
_SCHEMES = ("minari:", "generated:")


def check_paths(data: DataSection) -> None:
    """Raise UserErrors with all paths that lead nowhere, each with its setting."""
    problems = []
    for setting, path in _named(data):
        if path == STDLIB or not is_plain_path(path):
            continue
        try:
            existing_path(path)
        except UserError as error:
            problems.append(f"{error} (data.{setting})")
    if problems:
        raise UserErrors(problems)


def named_paths(data: DataSection) -> list[str]:
    """All paths of data in the settings, each once."""
    return list(dict.fromkeys(path for _, path in _named(data)))


def is_plain_path(path: str) -> bool:
    """Whether this is a file, a folder or our standard text: not generated, downloaded, or readable only once."""
    is_special = path in (STDIN, NORMALIZATION_CORPUS) or path.startswith(_SCHEMES)
    return not (is_special or is_hub_dataset(path) or Path(path).is_fifo())


def files_at(path: str) -> Iterator[Path]:
    """The file at a path, or all files below it."""
    root = Path(path).expanduser()
    if root.is_file():
        yield root
    for folder, _, names in os.walk(root):
        yield from (file for name in names if (file := Path(folder, name)).is_file())


def _named(data: DataSection) -> Iterator[tuple[str, str]]:
    """Each setting of paths with each of its paths."""
    for setting in _SETTINGS:
        value = getattr(data, setting, None)
        if isinstance(value, str | list | tuple):
            yield from ((setting, path) for path in path_list(value))
