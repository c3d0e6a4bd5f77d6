"""Examples of several parts: archives, batches in every form, missing parts, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyformer.base.errors import UserError
from manyformer.config import ModalitiesData
from manyformer.data import open_data, open_file, open_held_out
from manyformer.data.audio.log_mel import LogMelFrontEnd
from manyformer.data.pipeline.kind import OpenRequest, kind_of
from manyformer.data.pipeline.opened import EvaluationData, OpenedData
from manyformer.nn.batches import IGNORE_INDEX, ModalitiesBatch, Seq2SeqBatch

IMAGES = np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4)
ARRAYS: dict[str, Any] = {
    "images": IMAGES,
    "image_index": np.array([0, 1, 2, -1, 4, 5]),
    "texts": np.array(["red", "a red box", "blue", "a box", "red box"]),
    "text_index": np.array([0, 1, -1, 3, 4, 1]),
    "labels": np.array([0, 1, 0, 1, -1, 1]),
    "label_names": np.array(["no", "yes"]),
    "train": np.array([0, 1, 2, 3]),
    "valid": np.array([4, 5]),
}


def write(folder: Path, **changes: Any) -> Path:
    arrays = {name: array for name, array in (ARRAYS | changes).items() if array is not None}
    np.savez(folder / "examples.npz", **arrays)
    return folder / "examples.npz"


def section(folder: Path, **settings: Any) -> ModalitiesData:
    return ModalitiesData(**({"path": str(folder / "examples.npz")} | settings))


def opened(folder: Path, form: str = "labelled", batch_tokens: int = 100, /, **settings: Any) -> OpenedData:
    return open_data(section(folder, **settings), form, batch_tokens=batch_tokens, cache=folder / "cache", seed=0)


def held_out(folder: Path, form: str, **settings: Any) -> EvaluationData:
    return open_held_out(section(folder, **settings), form, OpenRequest(100, folder / "cache"), None)


def first_batch(data: EvaluationData) -> Any:
    assert data.batches is not None
    return next(iter(data.batches))


def test_captions_are_targets_of_images(tmp_path: Path) -> None:
    write(tmp_path)
    data = opened(tmp_path, "captions")
    # words of the training texts alone: red, a, box
    assert data.required_keywords == {"vocab": data.target.vocab}
    assert data.offered_keywords == {"height": 4, "width": 4, "channels": 1, "mels": None, "vocab": data.target.vocab}
    batch = next(data.train)
    assert isinstance(batch, Seq2SeqBatch)
    # example 2 has no text and example 3 no image
    order = [0, 1] if int(batch.source[0, 0, 0, 0]) == 0 else [1, 0]
    assert batch.source[order].numpy().tolist() == IMAGES[:2, ..., None].tolist()
    red, box, a = (data.target.encode(word)[0] for word in ("red", "box", "a"))
    assert batch.target[order].tolist() == [[1, red, 0, 0], [1, a, red, box]]
    assert batch.targets[order].tolist() == [[red, 2, IGNORE_INDEX, IGNORE_INDEX], [a, red, box, 2]]
    assert batch.target_segments is not None
    assert batch.target_segments[order].tolist() == [[0, 0, -1, -1], [0, 0, 0, 0]]
    evaluation = held_out(tmp_path, "captions")
    assert [example.target for example in evaluation.examples] == ["red box", "a red box"]


def test_examples_without_a_part_have_padding_in_its_place(tmp_path: Path) -> None:
    write(tmp_path)
    data = opened(tmp_path)
    assert data.required_keywords == {"classes": 2}
    batch = next(data.train)
    assert isinstance(batch, ModalitiesBatch)
    assert sorted(batch.labels.tolist()) == [0, 0, 1, 1]
    assert batch.images is not None
    assert batch.image_segments is not None
    pixels = [image.flatten().tolist() for image in batch.images[batch.image_segments == 0]]
    assert sorted(pixels) == [image.ravel().tolist() for image in IMAGES[:3]]
    assert not batch.images[batch.image_segments == -1].any()
    assert batch.tokens is not None
    assert batch.token_segments is not None
    rows = {tuple(tokens[segments == 0].tolist()) for tokens, segments in zip(batch.tokens, batch.token_segments)}
    encode = data.target.encode
    assert rows == {(), (1, *encode("red"), 2), (1, *encode("a red box"), 2), (1, *encode("a box"), 2)}
    # example 4 has no label
    assert first_batch(held_out(tmp_path, "labelled")).labels.tolist() == [1]


def test_only_the_parts_that_are_asked_for_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    batch = next(opened(tmp_path, parts=["image"]).train)
    assert batch.tokens is None
    assert len(batch.labels) == 3
    with pytest.raises(UserError, match="there is no sound in it, but only image, text"):
        opened(tmp_path, parts=["sound"])


def test_dropped_parts_leave_one_and_follow_from_the_seed(tmp_path: Path) -> None:
    write(tmp_path, image_index=np.arange(6), text_index=np.array([0, 1, 2, 3, 4, 1]))
    counts = np.zeros(3, dtype=int)
    data, again = (opened(tmp_path, part_dropout=0.5) for _ in range(2))
    for _ in range(40):
        batch, other = next(data.train), next(again.train)
        for part, copy in zip(batch, other, strict=True):
            assert torch.equal(part, copy) if isinstance(part, torch.Tensor) else part == copy
        has_image, has_text = batch.image_segments == 0, (batch.token_segments == 0).any(1)
        assert (has_image | has_text).all()
        counts += [int(has_image.sum()), int(has_text.sum()), int((has_image & has_text).sum())]
    # each part is missing in a quarter of the 160 rows: dropped, and not the one that stays
    assert 100 < counts[0] < 140
    assert 100 < counts[1] < 140
    assert all((first_batch(held_out(tmp_path, "labelled")).token_segments == 0).any(1))


def test_pairs_to_contrast_have_both_parts(tmp_path: Path) -> None:
    write(tmp_path, labels=np.array([0, -1, 0, 1, -1, 1]))
    batch = next(opened(tmp_path, "contrast").train)
    # an example without a label is compared as well
    assert sorted(batch.labels.tolist()) == [0, 2]
    assert batch.target_count() == 2
    with pytest.raises(UserError, match=r"data\.parts must be the two parts that are compared, and is image"):
        opened(tmp_path, "contrast", parts=["image"])


def test_another_archive_is_scored_with_the_tokens_of_the_run(tmp_path: Path) -> None:
    write(tmp_path)
    data = opened(tmp_path)
    (tmp_path / "other").mkdir()
    path = write(tmp_path / "other", train=None, valid=None)
    request = OpenRequest(100, tmp_path / "scratch")
    batch = first_batch(open_file(section(tmp_path), "labelled", data.tokenizers, str(path), request))
    assert batch.labels.tolist() == [0, 1, 0, 1]
    write(tmp_path / "other", label_names=np.array(["yes", "no"]))
    with pytest.raises(UserError, match="its labels are"):
        open_file(section(tmp_path), "labelled", data.tokenizers, str(path), request)


def test_all_examples_of_an_archive_are_predicted_in_order(tmp_path: Path) -> None:
    write(tmp_path)
    data, read_inputs = opened(tmp_path), kind_of(section(tmp_path)).unlabelled
    assert read_inputs is not None
    path = str(tmp_path / "examples.npz")
    inputs = read_inputs(section(tmp_path), data.tokenizers, path, OpenRequest(100, tmp_path / "scratch"))
    batches: Any = list(inputs.batches or ())
    assert [item.name for item in inputs.inputs] == [f"{path}: example {number}" for number in range(6)]
    assert sum(len(batch.labels) for batch in batches) == 6
    first = torch.cat([batch.images[:, 0, 0, 0] for batch in batches])
    assert first.tolist() == [0, 16, 32, 0, 64, 80]


SOUNDS: dict[str, Any] = {
    "samples": (1000 * np.sin(np.arange(900) / 3)).astype(np.int16),
    "lengths": np.array([300, 400, 200]),
    "sample_rate": np.array(1000),
    "sound_index": np.array([0, -1, 1, 2, 1, 2]),
}
FRAMES: dict[str, Any] = {"mels": 4, "window": 32.0, "hop": 16.0}


def test_sound_is_read_by_the_front_end_of_the_training_recordings(tmp_path: Path) -> None:
    write(tmp_path, **SOUNDS)
    data = opened(tmp_path, "labelled", 200, **FRAMES)
    assert data.offered_keywords["mels"] == 4
    batch = next(data.train)
    assert isinstance(batch, ModalitiesBatch)
    assert batch.frames is not None
    assert batch.frame_segments is not None
    # 300, 400 and 200 samples have 19, 26 and 13 frames, each centred at a multiple of 16
    assert sorted((batch.frame_segments == 0).sum(1).tolist()) == [0, 13, 19, 26]
    frames = batch.frames[batch.frame_segments == 0]
    torch.testing.assert_close(frames.mean(0), torch.zeros(4), rtol=0, atol=1e-4)
    assert not batch.frames[batch.frame_segments == -1].any()
    row = int((batch.frame_segments == 0).sum(1).argmax())
    front_end = data.source
    assert isinstance(front_end, LogMelFrontEnd)
    wave = torch.from_numpy(SOUNDS["samples"][300:700].astype(np.float32) / 2**15)
    alone = front_end.features(wave[None], np.array([400]))[0]
    torch.testing.assert_close(batch.frames[row, :26], alone)


def test_codes_of_the_mu_law_are_read_and_other_rates_refused(tmp_path: Path) -> None:
    write(tmp_path, **SOUNDS | {"samples": np.full(900, 255, dtype=np.uint8)})
    data = opened(tmp_path, "labelled", 200, **FRAMES)
    request = OpenRequest(200, tmp_path / "scratch")
    (tmp_path / "other").mkdir()
    path = write(tmp_path / "other", **SOUNDS | {"sample_rate": np.array(8000)})
    with pytest.raises(UserError, match="8,000 samples a second, and those of the model 1,000; resample them"):
        open_file(section(tmp_path, **FRAMES), "labelled", data.tokenizers, str(path), request)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lengths": None}, "need an array lengths"),
        ({"sample_rate": None}, "need an array sample_rate"),
        ({"samples": np.zeros((9, 100), dtype=np.int16)}, "samples must be mu-law codes"),
        ({"lengths": np.array([300, 400, 100])}, "sum to the 900 samples, and sum to 800"),
        ({"lengths": np.array([900, 0, 0])}, "lengths must be 1 or more"),
        ({"sample_rate": np.array(5)}, "sample_rate is 5, and must be 1,000 to 768,000"),
        ({"sound_index": np.array([0, 3, 1, 2, 1, 2])}, "sound_index of example 1 is 3, and must be 0 to 2"),
    ],
)
def test_recordings_with_defects_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    write(tmp_path, **SOUNDS | changes)
    with pytest.raises(UserError, match=sentence):
        opened(tmp_path, "labelled", 200, **FRAMES)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"images": IMAGES.astype(np.float32)}, "images must be bytes"),
        ({"images": np.zeros((6, 4, 4, 2), dtype=np.uint8)}, "images must have 1 or 3 channels, and have 2"),
        ({"image_index": np.array([0, 1, 2, 6, 4, 5])}, "image_index of example 3 is 6, and must be 0 to 5"),
        ({"image_index": np.array([0, 1])}, "text_index are for 6 examples, and image_index for 2"),
        ({"labels": np.array([0, 1])}, "labels are for 2 examples, and image_index for 6"),
        ({"texts": np.array(["", "x", "y", "z", "u"])}, "text 0 is empty"),
        ({"texts": np.array([1, 2, 3, 4, 5])}, "texts must be an array of texts"),
        ({"text_index": np.array([0, 1, -1, -1, 4, 1])}, "example 3 has no part, neither image nor text"),
        ({"images": None, "texts": None}, "examples have two at least of images, samples, texts and labels"),
        ({"train": np.array([0, 9])}, "train must be numbers from 0 to 5"),
        ({"valid": np.array([0])}, "valid and train share the number 0"),
        ({"texts": np.array([None] * 5, dtype=object)}, "cannot be read"),
    ],
)
def test_archives_with_defects_are_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    write(tmp_path, **changes)
    with pytest.raises(UserError, match=sentence):
        opened(tmp_path)


def test_a_batch_holds_the_longest_example(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=r"batch.tokens is 20, less than the 21 values and tokens.*batch.tokens=1344"):
        opened(tmp_path, "labelled", 20)


def test_captions_need_texts_and_labels_are_needed_to_classify(tmp_path: Path) -> None:
    write(tmp_path, texts=None, text_index=None, image_index=None)
    with pytest.raises(UserError, match="there is no text in it, but only image"):
        opened(tmp_path, "captions")
    write(tmp_path, labels=None, label_names=None)
    with pytest.raises(UserError, match="there is no array labels in it"):
        opened(tmp_path)
