"""Hugging Face data sets, by name or from a local folder in their format; needs the `data` extra."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manyformer.data.table_columns import ColumnKey
from manyformer.data.table_files import TableRow, cell_text, optional_text
from manyformer.errors import UserError, list_names
from manyformer.libraries.library_calls import load_dataset_split, load_saved_dataset, without_decoding

HUB_PREFIX = "hf:"


def is_hub_dataset(path: str) -> bool:
    """Whether the path is a Hugging Face data set: a name with `hf:`, or a folder written by `save_to_disk`."""
    return path.startswith(HUB_PREFIX) or _is_saved_to_disk(Path(path))


class HubDataset:
    """One split of a data set: `hf:NAME`, `hf:NAME@CONFIG`, `hf:NAME#SPLIT` (by default the split `train`)."""

    def __init__(self, path: str) -> None:
        self.path = path
        name_and_config, _, split = path.removeprefix(HUB_PREFIX).partition("#")
        self.name, _, config = name_and_config.partition("@")
        self.split = split or "train"
        self._records = _load_split(self.name, config or None, self.split)
        self.fingerprint: str = str(self._records._fingerprint)

    def __len__(self) -> int:
        return len(self._records)

    def rows(self, columns: Sequence[ColumnKey], *, optional: int = 0) -> Iterator[TableRow]:
        """Stream the requested columns of the records in order; class labels are given by name if they have names.

        The last `optional` columns may be missing; their cells are empty then."""
        names = {column: _label_names(self._records.features, column) for column in columns}
        needed = len(columns) - optional
        for number, record in enumerate(without_decoding(self._records)):
            location = f"{self.path}, record {number}"
            cells = [cell_text(record, column, location) for column in columns[:needed]]
            cells += [optional_text(record, str(column)) for column in columns[needed:]]
            yield TableRow(
                tuple(_label_text(text, names[column]) for text, column in zip(cells, columns, strict=True)), location
            )


def _label_text(text: str, names: list[str] | None) -> str:
    # -1 marks a record without a label, as in test sets with hidden labels.
    if names and text.isdecimal() and int(text) < len(names):
        return names[int(text)]
    return text


def _label_names(features: Any, column: ColumnKey) -> list[str] | None:
    names = getattr(features.get(column), "names", None)
    if names:
        return list(names)
    return None


def _load_split(name: str, config: str | None, split: str) -> Any:
    try:
        if _is_saved_to_disk(Path(name)):
            dataset = _select_split(load_saved_dataset(name), config, split, name)
        else:
            dataset = load_dataset_split(name, config, split)
        # without this pass over the data, reading a damaged file can end the process with a signal
        dataset.data.table.validate(full=True)
        return dataset
    except UserError:
        raise
    # The library raises a dozen exception classes, all of which mean that this data set cannot be loaded.
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "datasets":
            raise UserError(
                f"data.path {HUB_PREFIX}{name} needs the `datasets` library: pip install 'manyformer[data]'"
            ) from None
        sentence = " ".join(str(error).split())
        raise UserError(
            f"{HUB_PREFIX}{name}: this data set cannot be loaded ({type(error).__name__}: {sentence})"
        ) from error


def _is_saved_to_disk(folder: Path) -> bool:
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _select_split(saved: Any, config: str | None, split: str, name: str) -> Any:
    """The split of a data set, or of several splits, from a folder."""
    if isinstance(saved, dict):
        splits = saved
    else:
        splits = {"train": saved}
    if config is not None:
        raise UserError(f"{HUB_PREFIX}{name}: a folder has no configurations; leave out @{config}")
    if split not in splits:
        raise UserError(f"{HUB_PREFIX}{name}: there is no split {split!r}; it has {list_names(splits)}")
    return splits[split]
