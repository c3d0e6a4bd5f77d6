"""The labels of a run's heads in the file `heads.json` of its folder, which other commands show beside the heads."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, ClassVar

from annotated_types import Len
from pydantic import StringConstraints

from manyformer.files.json_records import FileRecord
from manyformer.heads.head_analysis import HeadReport

HEAD_LABELS_FILE = "heads.json"

_PartName = Annotated[str, StringConstraints(max_length=200)]
_HeadLabel = Annotated[str, StringConstraints(max_length=200)]


class HeadLabelsRecord(FileRecord):
    """The label of each head of each part of a model, "" for a head without one."""

    title: ClassVar[str] = "the labels of attention heads"
    max_bytes: ClassVar[int] = 1 << 22

    labels: Annotated[dict[_PartName, Annotated[tuple[_HeadLabel, ...], Len(1, 4096)]], Len(1, 4096)]


def write_head_labels(reports: Sequence[HeadReport], folder: Path) -> Path:
    """Write the labels of the heads into the folder of their run, and return the path of the file."""
    labels: dict[str, tuple[str, ...]] = {}
    for report in reports:
        labels[report.part] = (*labels.get(report.part, ()), ", ".join(report.labels))
    path = folder / HEAD_LABELS_FILE
    HeadLabelsRecord(labels=labels).write(path)
    return path


def read_head_labels(folder: Path) -> dict[str, tuple[str, ...]] | None:
    """The labels of the heads of each part of a run's model; None if its heads were not analysed.

    Raises DamagedFile, and UserError for a file of another format."""
    path = folder / HEAD_LABELS_FILE
    return HeadLabelsRecord.read(path).labels if path.exists() else None
