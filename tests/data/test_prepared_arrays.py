"""Graphs, examples of several parts and episodes: kept as arrays, which belong to the model trained on them."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from manyformer.base.errors import UserError
from manyformer.config import DataSection, GraphsData, ModalitiesData, TrajectoriesData
from manyformer.data import OpenedData, open_data, open_file, open_held_out
from manyformer.data.pipeline.kind import OpenRequest
from manyformer.data.pipeline.opened import EvaluationData

BATCH_TOKENS = 64


class ArrayKind(NamedTuple):
    """A kind of data in arrays: its nouns in messages, its section, and an array of the archive with other numbers."""

    nouns: str
    section: type[DataSection]
    form: str
    arrays: dict[str, Any]
    changed: dict[str, Any]
    targets: int
    """How many targets the whole archive has, where it names no splits."""
    settings: Mapping[str, Any] = MappingProxyType({})


GRAPHS = ArrayKind(
    "graphs",
    GraphsData,
    "nodes",
    {
        "edges": np.array([[0, 1], [1, 2], [2, 0], [3, 4]]),
        "labels": np.array([0, 1, -1, 1, 0, 1]),
        "features": np.arange(12, dtype=np.float32).reshape(6, 2),
    },
    {"labels": np.array([1, 1, -1, 0, 0, 1])},
    5,
)
EXAMPLES = ArrayKind(
    "examples",
    ModalitiesData,
    "labelled",
    {
        "images": np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4),
        "texts": np.array(["red", "a red box", "blue", "a box", "red box", "red"]),
        "labels": np.array([0, 1, 0, 1, -1, 1]),
    },
    {"labels": np.array([1, 1, 0, 0, -1, 1])},
    5,
)
EPISODES = ArrayKind(
    "episodes",
    TrajectoriesData,
    "windows",
    {
        "observations": np.arange(22, dtype=np.float32).reshape(11, 2),
        "actions": np.arange(11) % 3,
        "rewards": np.ones(11, dtype=np.float32),
        "lengths": np.array([3, 2, 5, 1]),
    },
    {"rewards": np.zeros(11, dtype=np.float32)},
    11,
    {"length": 2},
)
each_kind = pytest.mark.parametrize("kind", [GRAPHS, EXAMPLES, EPISODES], ids=lambda kind: kind.nouns)


def write(kind: ArrayKind, path: Path, **changes: Any) -> Path:
    np.savez(path, **kind.arrays | changes)
    return path


def section_of(kind: ArrayKind, folder: Path) -> DataSection:
    return kind.section.model_validate({"path": str(folder / "arrays.npz"), "valid": 0.25, **kind.settings})


def opened(kind: ArrayKind, folder: Path, *, lines: list[str] | None = None, trained: bool = False) -> OpenedData:
    log = (lambda line: None) if lines is None else lines.append
    return open_data(
        section_of(kind, folder),
        kind.form,
        batch_tokens=BATCH_TOKENS,
        cache=folder / "cache",
        seed=0,
        belongs_to_model=trained,
        log=log,
    )


def held_out(kind: ArrayKind, folder: Path, data: OpenedData, split: str | None = None) -> EvaluationData:
    request = OpenRequest(BATCH_TOKENS, folder / "cache", belongs_to_model=True, tokenizers=data.tokenizers)
    return open_held_out(section_of(kind, folder), kind.form, request, split)


def target_count(evaluation: EvaluationData) -> int:
    assert evaluation.batches is not None
    return sum(batch.target_count() for batch in evaluation.batches)


@each_kind
def test_a_trained_run_needs_its_archive_no_more(kind: ArrayKind, tmp_path: Path) -> None:
    archive = write(kind, tmp_path / "arrays.npz")
    data = opened(kind, tmp_path)
    archive.unlink()
    evaluation = held_out(kind, tmp_path, data)
    assert evaluation.name == "valid"
    assert target_count(evaluation) == sum(batch.target_count() for batch in data.valid) > 0
    with pytest.raises(UserError, match="has no test data; "):
        held_out(kind, tmp_path, data, "test")


@each_kind
def test_the_arrays_that_a_model_was_trained_on_are_not_replaced(kind: ArrayKind, tmp_path: Path) -> None:
    archive = write(kind, tmp_path / "arrays.npz")
    data = opened(kind, tmp_path)
    kept = (tmp_path / "cache" / f"{kind.nouns}.npz").read_bytes()
    write(kind, archive, **kind.changed)
    sentence = f"these {kind.nouns} are others than those that this run was trained on; restore the previous data"
    with pytest.raises(UserError, match=f"arrays.npz: {sentence}"):
        opened(kind, tmp_path, trained=True)
    assert (tmp_path / "cache" / f"{kind.nouns}.npz").read_bytes() == kept
    assert target_count(held_out(kind, tmp_path, data)) > 0
    # equal arrays in a file that was written anew are the same data
    write(kind, archive)
    assert opened(kind, tmp_path, trained=True).train.state_dict() == data.train.state_dict()


@each_kind
def test_other_arrays_do_not_continue_a_checkpoint(kind: ArrayKind, tmp_path: Path) -> None:
    archive = write(kind, tmp_path / "arrays.npz")
    state = opened(kind, tmp_path).train.state_dict()
    opened(kind, tmp_path).train.load_state_dict(state)
    write(kind, archive, **kind.changed)
    with pytest.raises(UserError, match="the data differs from what this run was trained on"):
        opened(kind, tmp_path).train.load_state_dict(state)


@each_kind
def test_a_damaged_file_of_arrays_is_told_and_prepared_again(kind: ArrayKind, tmp_path: Path) -> None:
    write(kind, tmp_path / "arrays.npz")
    data = opened(kind, tmp_path)
    kept = tmp_path / "cache" / f"{kind.nouns}.npz"
    kept.write_bytes(kept.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{kind.nouns}\.npz is damaged"):
        held_out(kind, tmp_path, data)
    lines: list[str] = []
    again = opened(kind, tmp_path, lines=lines)
    assert len(lines) == 1
    assert f"{kind.nouns}.npz is damaged: it has" in lines[0]
    assert "; preparing the data again" in lines[0]
    assert again.train.state_dict() == data.train.state_dict()
    kept.unlink()
    with pytest.raises(UserError, match=rf"{kind.nouns}\.npz is missing"):
        held_out(kind, tmp_path, data)


@each_kind
def test_all_of_another_archive_is_scored(kind: ArrayKind, tmp_path: Path) -> None:
    write(kind, tmp_path / "arrays.npz")
    data = opened(kind, tmp_path)
    other = write(kind, tmp_path / "other.npz")
    request = OpenRequest(BATCH_TOKENS, tmp_path / "scratch")
    evaluation = open_file(section_of(kind, tmp_path), kind.form, data.tokenizers, str(other), request)
    assert evaluation.name == str(other)
    assert target_count(evaluation) == kind.targets


@pytest.mark.parametrize("kind", [GRAPHS, EXAMPLES], ids=lambda kind: kind.nouns)
def test_data_of_other_labels_than_those_of_the_model_is_refused(kind: ArrayKind, tmp_path: Path) -> None:
    write(kind, tmp_path / "arrays.npz")
    data = opened(kind, tmp_path)
    other = write(kind, tmp_path / "other.npz", label_names=np.array(["no", "yes"]))
    request = OpenRequest(BATCH_TOKENS, tmp_path / "scratch")
    with pytest.raises(UserError, match=r"other.npz: its labels are \('no', 'yes'\), the model's \('0', '1'\)"):
        open_file(section_of(kind, tmp_path), kind.form, data.tokenizers, str(other), request)
    # labels of the prepared data of the run itself
    renamed = data.tokenizers._replace(labels=("no", "yes"))
    request = OpenRequest(BATCH_TOKENS, tmp_path / "cache", belongs_to_model=True, tokenizers=renamed)
    with pytest.raises(UserError, match="was prepared with other tokenizers or labels than those of the model"):
        open_held_out(section_of(kind, tmp_path), kind.form, request, None)
