"""Sums of contents: other content under the same name, size and time is noticed, and stamps without sums still hold."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import write_manifest
from manyformer.config import AudioData, DataSection, GraphsData, ImagesData, TextData, TrajectoriesData
from manyformer.data import open_data
from manyformer.data.storage.cache_folder import RECORD_FILE, PreparedRecord
from manyformer.data.storage.content_sums import (
    MAX_FILES,
    WHOLE_BYTES,
    changed_contents,
    content_sum,
    folder_sum,
    without_sums,
)

TOLD = "the content has changed since it was prepared, though sizes and modification times have not"


def replace(path: Path, content: bytes) -> None:
    """Replace the content of a file, but neither its size nor its modification time."""
    times = path.stat()
    assert len(content) == times.st_size
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def opened(data: DataSection, folder: Path, *, form: str = "next-token", belongs: bool = False) -> list[str]:
    """The lines of the log of an opening."""
    lines: list[str] = []
    open_data(data, form, batch_tokens=64, cache=folder / "cache", seed=0, belongs_to_model=belongs, log=lines.append)
    return lines


def text_data(tmp_path: Path) -> TextData:
    (tmp_path / "text.txt").write_text("a line of a text\n" * 60)
    return TextData(path=str(tmp_path / "text.txt"), tokenizer="byte", length=16, valid=0.2)


def test_other_content_of_equal_size_and_time_is_told_and_prepared(tmp_path: Path) -> None:
    data = text_data(tmp_path)
    opened(data, tmp_path)
    assert opened(data, tmp_path) == []
    replace(tmp_path / "text.txt", b"a line of a text\n" * 59 + b"another one here\n")
    lines = opened(data, tmp_path)
    assert any(f"text.txt: {TOLD}" in line for line in lines)
    assert opened(data, tmp_path) == []


def test_the_content_that_a_run_was_trained_on_is_not_replaced(tmp_path: Path) -> None:
    data = text_data(tmp_path)
    opened(data, tmp_path)
    replace(tmp_path / "text.txt", b"a line of a text\n" * 59 + b"another one here\n")
    with pytest.raises(UserError, match="the data differs from what this run was trained on"):
        opened(data, tmp_path, belongs=True)
    replace(tmp_path / "text.txt", b"a line of a text\n" * 60)
    assert opened(data, tmp_path, belongs=True) == []


def test_a_stamp_without_sums_still_holds(tmp_path: Path) -> None:
    """As versions up to 0.2.0 wrote it."""
    data, cache = text_data(tmp_path), tmp_path / "cache"
    opened(data, tmp_path)
    record = PreparedRecord.read(cache / RECORD_FILE)
    assert without_sums(record.made_from) != record.made_from
    record.model_copy(update={"made_from": without_sums(record.made_from)}).write(cache / RECORD_FILE)
    write_manifest(cache)
    assert opened(data, tmp_path, belongs=True) == []


def photos(tmp_path: Path) -> tuple[DataSection, str, Path]:
    pixels = np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)
    for number, image in enumerate(pixels):
        file = tmp_path / "photos" / "ab"[number % 2] / f"{number}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(file)
    return ImagesData(path=str(tmp_path / "photos"), valid=0.3), "labelled", tmp_path / "photos/a/10.bmp"


def episodes(tmp_path: Path) -> tuple[DataSection, str, Path]:
    path, generator = tmp_path / "episodes.npz", np.random.default_rng(0)
    arrays: dict[str, Any] = {"actions": np.zeros(40, int), "rewards": np.ones(40), "lengths": np.full(8, 5)}
    np.savez(path, observations=generator.random((40, 2), dtype=np.float32), **arrays)
    return TrajectoriesData(path=str(path), length=4, valid=0.25), "windows", path


def graphs(tmp_path: Path) -> tuple[DataSection, str, Path]:
    path, generator = tmp_path / "graphs.npz", np.random.default_rng(0)
    edges = np.stack([np.arange(19), np.arange(1, 20)], 1)
    np.savez(path, features=generator.random((20, 3)), labels=np.arange(20) % 2, edges=edges)
    return GraphsData(path=str(path), valid=0.3), "nodes", path


def tones(tmp_path: Path) -> tuple[DataSection, str, Path]:
    path, generator = tmp_path / "tones.npz", np.random.default_rng(0)
    samples = generator.integers(-99, 99, 8000, dtype=np.int16)
    np.savez(path, samples=samples, lengths=np.full(20, 400), label=np.arange(20) % 2, sample_rate=np.array(8000))
    return AudioData(path=str(path), sample_rate=8000, mels=8, valid=0.3), "labelled", path


@pytest.mark.parametrize("make", [photos, episodes, graphs, tones])
def test_other_content_of_every_kind_of_data_is_told(tmp_path: Path, make: Any) -> None:
    data, form, path = make(tmp_path)
    opened(data, tmp_path, form=form)
    assert opened(data, tmp_path, form=form) == []
    if path.suffix == ".npz":
        original = path.stat()
        with np.load(path) as archive:
            arrays = {name: archive[name] for name in archive.files}
        changed = "observations" if "observations" in arrays else "features" if "features" in arrays else "samples"
        arrays[changed] = arrays[changed][::-1]
        np.savez(path, **arrays)
        assert path.stat().st_size == original.st_size
        os.utime(path, ns=(original.st_atime_ns, original.st_mtime_ns))
    else:
        content = path.read_bytes()
        replace(path, content[:-1] + bytes([content[-1] ^ 0x40]))
    assert any(TOLD in line for line in opened(data, tmp_path, form=form))


def test_a_small_file_is_summed_whole_and_a_large_one_at_its_ends_and_between(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(WHOLE_BYTES))
    original = content_sum(path)
    for position in (0, 1, WHOLE_BYTES // 2, WHOLE_BYTES - 1):
        content = bytearray(WHOLE_BYTES)
        content[position] = 1
        path.write_bytes(content)
        assert content_sum(path) != original
    size = 40 * WHOLE_BYTES
    path.write_bytes(bytes(size))
    original = content_sum(path)
    assert content_sum(path) == original
    for position in (0, size - 1):
        content = bytearray(size)
        content[position] = 1
        path.write_bytes(content)
        assert content_sum(path) != original
    # a stretch of other content, as another version of a file has
    content = bytearray(size)
    content[size // 3 : 2 * size // 3] = b"x" * (2 * size // 3 - size // 3)
    path.write_bytes(content)
    assert content_sum(path) != original


def test_the_sum_of_a_folder_reads_a_bounded_number_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / str(number) for number in range(3 * MAX_FILES)]
    for file in files:
        file.touch()
    read: list[Path] = []

    def read_and_note(path: Path) -> str:
        read.append(path)
        return ""

    monkeypatch.setattr("manyformer.data.storage.content_sums.content_sum", read_and_note)
    folder_sum(files)
    assert len(read) == MAX_FILES
    assert read[0] == files[0]
    assert folder_sum([]) == folder_sum([])


def test_the_file_whose_content_has_changed_is_named() -> None:
    recorded = {"stamps": {"train": [["/a", 1, 2, "sampled-sum:1", "/b", 3, 4, "sampled-sum:2", "column"]]}}
    current = {"stamps": {"train": [["/a", 1, 2, "sampled-sum:1", "/b", 3, 4, "sampled-sum:9", "column"]]}}
    assert changed_contents(recorded, current) == ["/b"]
    assert changed_contents(without_sums(recorded), current) == []
    assert without_sums(recorded) == without_sums(current)
