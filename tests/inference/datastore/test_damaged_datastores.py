"""Every file of a datastore is compared with what was written, and no field of a copied one is believed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stores import written

from editing import edit_record
from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import write_manifest
from manyformer.data.storage.neighbour_tables import NOTE_FILE, open_neighbour_table, write_neighbour_table
from manyformer.inference.datastore import Datastore, KNNSettings
from manyformer.nn.batches import NO_NEIGHBOUR

DOCUMENTS = [[1, 10, 11, 12, 2], [1, 20, 2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    store = written(folder, np.ones((6, 3), np.float32), DOCUMENTS)
    store.save_settings(KNNSettings(3, 0.35, 2.0))
    return folder


def used(folder: Path) -> KNNSettings:
    return Datastore(folder).load_settings()


@pytest.mark.parametrize(
    "name", ["keys", "text.tokens", "text.offsets", "datastore.json", "manifest.json", "tuned.json"]
)
def test_a_flipped_bit_is_named_with_its_file(folder: Path, tmp_path: Path, name: str) -> None:
    damaged = shutil.copytree(folder, tmp_path / "damaged", ignore=shutil.ignore_patterns(".*"))
    assert used(damaged) == KNNSettings(3, 0.35, 2.0)
    content = (damaged / name).read_bytes()
    for position in range(0, len(content), max(1, len(content) // 40)):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        (damaged / name).write_bytes(changed)
        # white space means nothing
        if name in ("manifest.json", "tuned.json") and _meaning(changed) == _meaning(content):
            assert used(damaged) == KNNSettings(3, 0.35, 2.0)
        else:
            # a sum that does not fit may be the one that is damaged
            with pytest.raises(UserError, match="damaged/" if name == "manifest.json" else f"damaged/{name}"):
                used(damaged)
    (damaged / name).unlink()
    if name == "tuned.json":
        assert used(damaged).neighbours == 6
    else:
        with pytest.raises(UserError, match=name):
            used(damaged)


def _meaning(content: bytes) -> Any:
    try:
        record = json.loads(content)
    except ValueError:
        return content
    return record


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "was written in format 99 by manyformer"),
        ({"precision": "O"}, "precision"),
        ({"width": 10**18}, "take .* bytes, and it has 72"),
        ({"width": -3}, "width"),
        ({"model": "../../etc/passwd"}, "model"),
        ({"vocab": 12}, "the token 20 is not one of a vocabulary of 12"),
        ({"unknown": 1}, "unknown"),
        ({"text.dtype": "object"}, "dtype"),
        ({"text.tokens": 10**15}, "take .* bytes, and it has"),
        ({"text.documents": 8}, "have no context"),
        ({"text.largest": 19}, "its largest token is not 19"),
        ({"text.documents": 2.5}, "documents"),
    ],
)
def test_no_field_of_an_edited_datastore_is_believed(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied", ignore=shutil.ignore_patterns(".*"))

    def change_fields(content: dict[str, Any]) -> None:
        for key, value in change.items():
            part = content["text"] if key.startswith("text.") else content
            part[key.removeprefix("text.")] = value

    edit_record(copied / "datastore.json", change_fields)
    write_manifest(copied)
    with pytest.raises(UserError, match=rf"copied/.*{message}"):
        used(copied)


def set_keys(folder: Path) -> None:
    keys = np.fromfile(folder / "keys", "<f4")
    keys[4] = np.nan
    keys.tofile(folder / "keys")


def set_offsets(folder: Path) -> None:
    np.array([0, 8, 8], "<i8").tofile(folder / "text.offsets")


def leave_folder(folder: Path) -> None:
    edit_record(
        folder / "manifest.json", lambda content: content["files"].update({"../keys": content["files"]["keys"]})
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_keys, "some of its numbers are infinite or none at all"),
        (set_offsets, "a document has no tokens"),
        (leave_folder, "the name of a file inside the folder is needed"),
    ],
)
def test_content_is_checked_behind_a_right_sum(
    folder: Path, tmp_path: Path, change: Callable[[Path], None], message: str
) -> None:
    copied = shutil.copytree(folder, tmp_path / "copied", ignore=shutil.ignore_patterns(".*"))
    change(copied)
    if change is not leave_folder:
        write_manifest(copied)
    with pytest.raises(UserError, match=message):
        used(copied)


def test_tables_of_neighbours_are_compared_with_their_sums(folder: Path, tmp_path: Path) -> None:
    shard = Datastore(folder).text
    with write_neighbour_table(tmp_path, shard, 2, "a search", 21) as table:
        table.write(np.arange(len(shard.tokens)), np.array([[7, NO_NEIGHBOUR]]))
    lookups = open_neighbour_table(str(tmp_path), shard, 21)
    assert lookups is not None
    assert lookups.lookup(np.array([3, -1])).tolist() == [[7, NO_NEIGHBOUR], [NO_NEIGHBOUR, NO_NEIGHBOUR]]
    (file,) = tmp_path.glob("*.tokens")
    content = bytearray(file.read_bytes())
    content[5] ^= 4
    file.write_bytes(content)
    with pytest.raises(UserError, match=f"{file.name} is damaged"):
        open_neighbour_table(str(tmp_path), shard, 21)
    note = (tmp_path / NOTE_FILE).read_text()
    for change, message in (
        ({"k": 10**15}, "take .* bytes, and it has"),
        ({"k": 0}, "k: "),
        ({"format": 0}, "format 0"),
    ):
        (tmp_path / NOTE_FILE).write_text(note)
        edit_record(tmp_path / NOTE_FILE, lambda content, change=change: content.update(change))
        with pytest.raises(UserError, match=message):
            open_neighbour_table(str(tmp_path), shard, 21)
