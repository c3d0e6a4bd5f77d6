"""The paths that the settings of a run name: all are looked at before anything is prepared."""

from pathlib import Path

from manyformer.config import DataSection
from manyformer.data.hub import is_hub_dataset
from manyformer.data.pair_tables import NORMALIZATION_CORPUS
from manyformer.data.piped_input import STDIN
from manyformer.data.splits import path_list
from manyformer.data.text_files import existing_path
from manyformer.data.text_sources import STDLIB
from manyformer.errors import UserError, UserErrors

SPLIT_SETTINGS = {"train": "path", "valid": "valid", "test": "test"}
"""The setting with the paths of each split."""
_NO_FILES = frozenset({STDIN, STDLIB, NORMALIZATION_CORPUS})


def check_paths(data: DataSection) -> None:
    """Raise UserError with the settings of all paths that lead nowhere."""
    problems = []
    for setting in SPLIT_SETTINGS.values():
        value = getattr(data, setting, None)
        if value is None or isinstance(value, int | float):
            continue
        for path in path_list(value):
            # what can be read only once is not touched
            if path in _NO_FILES or is_hub_dataset(path) or Path(path).is_fifo():
                continue
            try:
                existing_path(path)
            except UserError as error:
                problems.append(f"{error} (data.{setting})")
    if problems:
        raise UserErrors(problems)
