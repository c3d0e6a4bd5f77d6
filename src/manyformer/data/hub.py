"""Hugging Face data sets, by name or from a local folder in their format; needs the `data` extra."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from manyformer.data.table_files import ColumnKey, TableRow, cell
from manyformer.errors import UserError

PREFIX = "hf:"


def is_hub(path: str) -> bool:
    """Whether the path names a Hugging Face data set: by `hf:`, or as a folder that `save_to_disk` wrote."""
    return path.startswith(PREFIX) or _saved_to_disk(Path(path))


class HubSet:
    """One split of a data set: `hf:NAME`, `hf:NAME@CONFIG`, `hf:NAME#SPLIT` (train where no split is named)."""

    def __init__(self, path: str) -> None:
        self.path = path
        rest, _, split = path.removeprefix(PREFIX).partition("#")
        self.name, _, config = rest.partition("@")
        self.split = split or "train"
        self._rows = _load(self.name, config or None, self.split)
        self.fingerprint: str = str(self._rows._fingerprint)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, columns: Sequence[ColumnKey]) -> Iterator[TableRow]:
        """The asked columns, record after record, in order; labels that have names come as their names."""
        names = {column: _label_names(self._rows.features, column) for column in columns}
        for number, record in enumerate(self._rows):
            where = f"{self.path}, record {number}"
            cells = (cell(record, column, where) for column in columns)
            yield TableRow(
                tuple(_named(text, names[column]) for text, column in zip(cells, columns, strict=True)), where
            )


def _named(text: str, names: list[str] | None) -> str:
    # -1 marks a record without a label in data sets whose answers are kept secret.
    return names[int(text)] if names and text.isdecimal() else text


def _label_names(features: Any, column: ColumnKey) -> list[str] | None:
    names = getattr(features.get(column), "names", None)
    return list(names) if names else None


def _load(name: str, config: str | None, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"data.path {PREFIX}{name} needs the `datasets` library: pip install 'manyformer[data]'"
        ) from None
    try:
        if _saved_to_disk(Path(name)):
            found = datasets.load_from_disk(name)
            return _split_of(found, split, name) if isinstance(found, datasets.DatasetDict) else found
        return datasets.load_dataset(name, config, split=split)
    except UserError:
        raise
    # The library raises a dozen kinds, all of which mean that this data set cannot be had.
    except Exception as error:
        sentence = " ".join(str(error).split())
        raise UserError(
            f"{PREFIX}{name}: this data set cannot be loaded ({type(error).__name__}: {sentence})"
        ) from error


def _saved_to_disk(folder: Path) -> bool:
    return (folder / "state.json").exists() or (folder / "dataset_dict.json").exists()


def _split_of(found: Any, split: str, name: str) -> Any:
    if split not in found:
        raise UserError(f"{PREFIX}{name}: there is no split {split!r}; known: {', '.join(found)}")
    return found[split]
