"""Images: what batches hold of each kind of file, how they are divided, what is refused in which words, real MNIST."""

import gzip
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from manyformer.base.errors import UserError
from manyformer.config import ImagesData
from manyformer.data import OpenedData, load_tokenizers, open_data
from manyformer.data.images.image_files import open_image_files
from manyformer.data.images.image_reading import sort_labels
from manyformer.data.tokenizers.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.nn.batches import CausalLMBatch, ImageClassificationBatch
from real_data import shared_data

Images = NDArray[np.uint8]


def drawn(count: int, *shape: int, seed: int = 0) -> Images:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels_of(count: int) -> NDArray[np.int64]:
    return np.arange(count) % 3 * 5


def opened(path: Path, folder: Path, *, task: str = "labelled", batch: int = 60, **more: Any) -> OpenedData:
    data = ImagesData(**{"path": str(path), **more})
    return open_data(data, task, batch_tokens=batch, cache=folder / "cache", seed=0)


def all_of(batches: Any) -> tuple[Images, list[int]]:
    """The images and labels of batches, in their order."""
    actual = list(batches)
    assert all(isinstance(batch, ImageClassificationBatch) for batch in actual)
    return torch.cat([one.pixels for one in actual]).numpy(), [n for one in actual for n in one.labels.tolist()]


def epoch_of(data: OpenedData) -> list[Any]:
    return [next(data.train) for _ in range(data.train.batches)]


def write_idx(path: Path, array: NDArray[Any]) -> None:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    content = head + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def assert_same_images(found: tuple[Images, list[int]], images: Images, labels: list[int]) -> None:
    """The same images with the same labels, in whatever order."""
    ours = sorted((image.tobytes(), label) for image, label in zip(*found, strict=True))
    assert ours == sorted((image.tobytes(), label) for image, label in zip(images, labels, strict=True))


@pytest.mark.parametrize("names", [("x", "y"), ("train_x", "train_y"), ("x_train", "y_train"), ("images", "labels")])
def test_archives(names: tuple[str, str], tmp_path: Path) -> None:
    images, labels = drawn(30, 4, 5), labels_of(30)
    np.savez(tmp_path / "a.npz", **{names[0]: images, names[1]: labels})
    data = opened(tmp_path / "a.npz", tmp_path, valid=0.2)
    assert data.labels == ("0", "5", "10")
    assert data.required_keywords == {"classes": 3}
    assert data.offered_keywords == {"height": 4, "width": 5, "channels": 1}
    train, valid = all_of(epoch_of(data)), all_of(data.valid)
    together = np.concatenate([train[0], valid[0]]), train[1] + valid[1]
    assert_same_images(together, images[..., None], (labels // 5).tolist())
    assert 1 <= len(valid[1]) <= 15
    assert data.test is None
    assert data.length_limits[0].length == 20
    batch = next(data.train)
    assert batch[0].dtype == torch.uint8
    assert batch[0].shape == (3, 4, 5, 1)


@pytest.mark.parametrize("end", ["", ".gz"])
def test_idx_files_and_their_folder(end: str, tmp_path: Path) -> None:
    images, others = drawn(24, 3, 4), drawn(6, 3, 4, seed=1)
    for name, array in (("train", images), ("t10k", others)):
        write_idx(tmp_path / f"{name}-images-idx3-ubyte{end}", array)
        write_idx(tmp_path / f"{name}-labels-idx1-ubyte{end}", labels_of(len(array)) // 5)
    data = opened(tmp_path, tmp_path, batch=36, valid=0.3)
    assert data.test is not None
    assert_same_images(all_of(data.test), others[..., None], (labels_of(6) // 5).tolist())
    file = tmp_path / f"train-images-idx3-ubyte{end}"
    alone = opened(file, tmp_path / "alone", batch=36, valid=str(tmp_path / f"t10k-images-idx3-ubyte{end}"))
    assert alone.test is None
    assert_same_images(all_of(alone.valid), others[..., None], (labels_of(6) // 5).tolist())
    assert sum(len(batch.labels) for batch in epoch_of(alone)) == 24


@pytest.mark.parametrize("parts", [[""], ["train", "test"], ["training", "val", "testing"]])
def test_folders(parts: list[str], tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    images = {part: drawn(12, 5, 4, 3, seed=number) for number, part in enumerate(parts)}
    for part, array in images.items():
        for number, image in enumerate(array):
            folder = root / part / ("dog" if number % 2 else "cat")
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
    (root / "notes.txt").write_text("not an image")
    data = opened(root, tmp_path, valid=str(root) if "val" in parts else 0.3)
    assert data.labels == ("cat", "dog")
    assert data.offered_keywords == {"height": 5, "width": 4, "channels": 3}
    labels = [number % 2 for number in range(12)]
    train = all_of(epoch_of(data))
    if "val" in parts:
        assert_same_images(train, images["training"], labels)
        assert_same_images(all_of(data.valid), images["val"], labels)
    assert (data.test is None) == (parts == [""])
    if data.test is not None:
        assert_same_images(all_of(data.test), images[parts[-1]], labels)


def test_modes_of_image_files(tmp_path: Path) -> None:
    """Grey stays grey, palettes and transparency become colours, one bit becomes black and white, 16 bits become 8."""
    grey = drawn(1, 4, 4)[0]
    files = {
        "grey": (Image.fromarray(grey), grey[..., None]),
        "bits": (Image.fromarray(grey > 127), np.where(grey > 127, 255, 0)[..., None]),
        "deep": (Image.fromarray(grey.astype(np.uint16) * 257), grey[..., None]),
        "clear": (Image.fromarray(np.dstack([grey] * 4)), np.dstack([grey] * 3)),
        "palette": (Image.fromarray(np.dstack([grey // 64 * 64] * 3)).convert("P"), None),
    }
    from manyformer.data.images.image_files import open_image_files

    for name, (image, expected) in files.items():
        (tmp_path / name).mkdir()
        image.save(tmp_path / name / "one.png")
        (picture,) = open_image_files(str(tmp_path / name))[""].images()
        assert picture.label is None
        if expected is None:
            assert picture.pixels.shape == (4, 4, 3)
        else:
            assert np.array_equal(picture.pixels, expected), name


def test_sequences_of_levels(tmp_path: Path) -> None:
    images = drawn(20, 3, 2, 3)
    np.savez(tmp_path / "a.npz", x=images)
    data = opened(tmp_path / "a.npz", tmp_path, task="levels", batch=72, valid=0.2)
    assert data.required_keywords == {"vocab": 256 + 5}
    assert data.labels is None
    batch = next(data.train)
    assert isinstance(batch, CausalLMBatch)
    assert batch.tokens.shape == (4, 18)
    assert (batch.tokens[:, 0] == 1).all()
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    rows = {image.tobytes() for image in images}
    levels = load_tokenizers(tmp_path / "cache").source
    assert isinstance(levels, PixelTokenizer)
    for row in batch.targets:
        # row by row, the channels of a pixel together
        assert levels.image(row).tobytes() in rows
    assert data.valid.units is not None
    assert data.valid.units.targets == data.valid.units.bytes == 18 * sum(len(one.tokens) for one in data.valid)


def test_sequences_in_blocks(tmp_path: Path) -> None:
    images = drawn(20, 4, 6, 3)
    np.savez(tmp_path / "a.npz", x=images, y=labels_of(20))
    data = opened(tmp_path / "a.npz", tmp_path, task="levels", batch=144, valid=0.2, block=(2, 3))
    assert data.offered_keywords == {"height": 4, "width": 6, "channels": 3, "block_height": 2, "block_width": 3}
    assert data.describe()[1] == "values: 4 x 6, 3 channels, 256 levels, in blocks of 2 x 3"
    levels = load_tokenizers(tmp_path / "cache").source
    assert isinstance(levels, PixelTokenizer)
    rows = {image.tobytes(): image for image in images}
    for row in next(data.train).targets:
        image = rows[levels.image(row).tobytes()]
        # the first block, the one on its right, then those below
        assert row.tolist()[:36] == [5 + n for left in (0, 3) for n in image[:2, left : left + 3].ravel().tolist()]
        assert row.tolist()[36:54] == [5 + n for n in image[2:, :3].ravel().tolist()]
        assert levels.tokens(image) == row.tolist()
    plain = opened(tmp_path / "a.npz", tmp_path / "plain", task="levels", batch=144, valid=0.2)
    assert (plain.offered_keywords["block_height"], plain.offered_keywords["block_width"]) == (1, 6)
    assert plain.train.state_dict() != data.train.state_dict()
    with pytest.raises(UserError, match="an image of 4 x 6 cannot be cut into blocks of 3 x 3"):
        opened(tmp_path / "a.npz", tmp_path, task="levels", batch=144, block=(3, 3))
    with pytest.raises(UserError, match=r"data\.block is the order in which a language model reads images"):
        opened(tmp_path / "a.npz", tmp_path, batch=144, block=(2, 3))


def test_fewer_levels(tmp_path: Path) -> None:
    images = np.array([0, 63, 64, 127, 128, 191, 192, 255], np.uint8).reshape(1, 2, 4).repeat(12, 0)
    images = np.concatenate([images, 255 - images])
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(24) % 2)
    settings: dict[str, Any] = {"levels": 4, "batch": 16, "valid": str(tmp_path / "a.npz")}
    data = opened(tmp_path / "a.npz", tmp_path, task="levels", **settings)
    first = data.source.encode("0 0 1 1 2 2 3 3")
    assert data.required_keywords == {"vocab": 4 + 5}
    assert next(iter(data.valid)).targets[0].tolist() in (first, first[::-1])  # type: ignore[union-attr]
    same = opened(tmp_path / "a.npz", tmp_path, **settings)
    assert set(next(same.train)[0].unique().tolist()) == {0, 85, 170, 255}


def test_the_tokenizer() -> None:
    levels = PixelTokenizer(16, ImageShape(1, 2, 3))
    assert levels.decode([1, 5, 20, 0]) == "0 15 "
    assert levels.encode("0 15") == [5, 20]
    assert PixelTokenizer.restore(levels.content()).content() == levels.content()
    # as it was saved before there were blocks
    assert PixelTokenizer.restore({"levels": 16, "height": 1, "width": 2, "channels": 3}).content() == levels.content()
    assert levels.image([5 + 15, 5, 1, 5 + 8]).tolist() == [[[255, 0, 0], [136, 0, 0]]]
    for text, message in (("0 16", "levels range from 0 to 15"), ("dark", "levels from 0 to 15, not 'dark'")):
        with pytest.raises(UserError, match=message):
            levels.encode(text)
    assert levels.quantize(np.arange(256, dtype=np.uint8)).tolist() == [n // 16 for n in range(256)]


def test_images_are_scaled_and_made_grey(tmp_path: Path) -> None:
    images = drawn(12, 4, 6, 3)
    np.savez(tmp_path / "a.npz", x=images, y=labels_of(12))
    data = opened(tmp_path / "a.npz", tmp_path, batch=24, size=2, valid=str(tmp_path / "a.npz"))
    assert data.offered_keywords == {"height": 2, "width": 2, "channels": 3}
    # the mean of the pixels that fall together
    expected = images.reshape(12, 2, 2, 2, 3, 3).mean((2, 4))
    actual = {tuple(np.round(image).ravel().astype(int).tolist()) for image in expected}
    for image in all_of(data.valid)[0]:
        assert min(np.abs(image.ravel().astype(int) - np.array(one)).max() for one in actual) <= 1
    grey = opened(tmp_path / "a.npz", tmp_path, batch=24, channels=1, valid=0.5)
    assert grey.offered_keywords["channels"] == 1


def test_equal_images_share_their_lot(tmp_path: Path) -> None:
    images = drawn(40, 3, 3).repeat(5, 0)
    np.savez(tmp_path / "a.npz", x=images, y=labels_of(200))
    data = opened(tmp_path / "a.npz", tmp_path, batch=27, valid=0.25)
    train, valid = ({image.tobytes() for image in all_of(part)[0]} for part in (epoch_of(data), data.valid))
    assert not train & valid
    assert 4 <= len(valid) <= 18


def test_what_is_prepared_is_kept_until_something_changes(tmp_path: Path) -> None:
    def said(**more: Any) -> list[str]:
        lines: list[str] = []
        config = ImagesData(path=str(tmp_path / "a.npz"), valid=0.3, **more)
        open_data(config, "labelled", batch_tokens=36, cache=tmp_path / "c", seed=0, log=lines.append)
        return lines

    np.savez(tmp_path / "a.npz", x=drawn(30, 3, 3), y=labels_of(30))
    assert said() == [f"preparing images: {tmp_path / 'a.npz'}"]
    assert said() == []
    assert said(levels=8)
    np.savez(tmp_path / "a.npz", x=drawn(33, 3, 3), y=labels_of(33))
    assert said(levels=8)


def test_training_goes_on_where_it_was(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=drawn(30, 3, 3), y=labels_of(30))
    one, other = (opened(tmp_path / "a.npz", tmp_path, batch=27, valid=0.3) for _ in range(2))
    for _ in range(2):
        next(one.train)
    other.train.load_state_dict(one.train.state_dict())
    assert torch.equal(next(one.train)[0], next(other.train)[0])
    # two processes see together what one sees alone
    halves = [one.train.shard(rank, 2) for rank in range(2)]
    full, parts = next(one.train), [next(half) for half in halves]
    assert sorted(full[1].tolist()) == sorted(label for part in parts for label in part[1].tolist())


@pytest.mark.parametrize(
    ("arrays", "given", "message"),
    [
        ({"z": drawn(9, 3, 3)}, {}, r"a\.npz: there are no images in it; it has z, but x or train_x is needed"),
        ({"x": drawn(9, 3, 3)}, {}, "these images have no labels, which this model needs"),
        ({"x": drawn(9, 3, 3), "y": labels_of(8)}, {}, r"9 images need labels of shape \(9,\), not \(8,\)"),
        ({"x": drawn(9, 3, 3) / 255, "y": labels_of(9)}, {}, "must be integers from 0 to 255 .*, but they are float64"),
        ({"x": drawn(9, 3, 3, 2), "y": labels_of(9)}, {}, r"or \(h, w, 3\), but it has \(3, 3, 2\)"),
        (
            {"x": drawn(9, 9), "y": labels_of(9)},
            {},
            r"images must be an array of 3 or 4 axes, but this one is \(9, 9\)",
        ),
        ({"x": drawn(9, 3, 3), "y": np.zeros(9)}, {}, "all training images have the label '0.0'"),
        ({"x": drawn(9, 3, 3), "y": labels_of(9)}, {"batch": 8}, r"batch\.tokens is 8, less than the 9 values of one"),
        (
            {"x": drawn(9, 3, 3), "y": labels_of(9)},
            {"batch": 900},
            r"images have \d+ values, fewer than one batch of 900",
        ),
        ({"test_x": drawn(9, 3, 3)}, {}, "there are no train images in it, only images for test"),
        ({"x": drawn(9, 3, 3), "y": labels_of(9)}, {"valid": 1e-9}, "too few images to hold out 1e-09 of them"),
    ],
)
def test_mistakes_in_archives(arrays: Any, given: Any, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "a.npz", tmp_path, **{"batch": 27, "valid": 0.5, **given})


def test_mistakes_in_files(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 broken")
    (tmp_path / "a-idx3-ubyte").write_bytes(b"\x00\x00\x0d\x03")
    (tmp_path / "b-idx3-ubyte").write_bytes(struct.pack(">BBBB3I", 0, 0, 8, 3, 2, 3, 3) + b"123")
    (tmp_path / "c.txt").write_text("no images")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken" / "cat").mkdir(parents=True)
    (tmp_path / "broken" / "cat" / "a.png").write_bytes(b"nothing")
    (tmp_path / "broken" / "dog").mkdir()
    (tmp_path / "broken" / "dog" / "b.png").write_bytes(b"nothing")
    for name, message in (
        ("a.npz", "this is not a complete NumPy archive"),
        ("a-idx3-ubyte", "not an IDX file of bytes; it starts with 00 00 0d 03 instead of 00 00 08"),
        ("b-idx3-ubyte", "this file is incomplete: its header gives 2 x 3 x 3 bytes, but it has 3"),
        ("c.txt", r"images must be a NumPy archive \(\.npz\), an IDX file"),
        ("empty", "this folder has no images"),
        ("broken", r"a\.png: Pillow cannot read this image"),
        ("b.npz", r"there is no such file; did you mean .*a\.npz"),
    ):
        with pytest.raises(UserError, match=message):
            opened(tmp_path / name, tmp_path)


def test_images_of_other_sizes_are_told_by_name(tmp_path: Path) -> None:
    root = tmp_path / "pictures"
    for label, shape in (("cat", (4, 4)), ("dog", (4, 5))):
        (root / label).mkdir(parents=True)
        for number in range(6):
            Image.fromarray(drawn(1, *shape, seed=number)[0]).save(root / label / f"{number}.png")
    with pytest.raises(UserError, match=r"dog/0\.png: this image is 4 x 5, grey, but .*cat/0\.png is 4 x 4, grey; set"):
        opened(root, tmp_path)
    assert opened(root, tmp_path, batch=16, size=4, valid=0.5).offered_keywords == {
        "height": 4,
        "width": 4,
        "channels": 1,
    }


def test_a_label_that_no_training_image_has(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", train_x=drawn(9, 3, 3), train_y=labels_of(9), test_x=drawn(1, 3, 3), test_y=[7])
    with pytest.raises(UserError, match="image 0 of test: the label '7' does not occur in the training data"):
        opened(tmp_path / "a.npz", tmp_path, batch=18)


def test_pillow_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "a.npz", x=drawn(9, 3, 3), y=labels_of(9))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    assert opened(tmp_path / "a.npz", tmp_path, batch=18, valid=0.5).labels
    with pytest.raises(UserError, match=r"scaling images needs Pillow: pip install 'manyformer\[data\]'"):
        opened(tmp_path / "a.npz", tmp_path, batch=18, size=2)


def test_real_digits(tmp_path: Path) -> None:
    path = shared_data("mnist", "mnist.npz")
    data = opened(path, tmp_path, batch=128 * 784)
    assert data.labels == tuple("0123456789")
    assert data.offered_keywords == {"height": 28, "width": 28, "channels": 1}
    assert data.test is not None
    images, labels = all_of(data.test)
    assert len(labels) == 10_000
    assert float(images.mean()) / 255 == pytest.approx(0.1325, abs=1e-4)
    assert 5_400 < sum(len(batch.labels) for batch in data.valid) < 6_600
    # what one histogram of the test images costs, as BASELINES.txt of the data says
    share = np.bincount(images.ravel(), minlength=256) / images.size
    train = np.load(path)["train_x"]
    model = np.bincount(train.ravel(), minlength=256) / train.size
    assert float(-(share[share > 0] * np.log2(model[share > 0])).sum()) == pytest.approx(1.9673, abs=2e-3)


def png(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds no pixels."""
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    checked = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(checked)


def npy(shape: tuple[int, ...], data: bytes = b"", descr: str = "|u1") -> bytes:
    """A NumPy array that declares a shape."""
    header = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def archive(path: Path, content: bytes, *, damage: int | None = None) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x.npy", content)
    if damage is not None:
        data = bytearray(path.read_bytes())
        data[damage] ^= 0xFF
        path.write_bytes(data)


@pytest.mark.parametrize(
    ("size", "problem"),
    [((15_000, 14_000), "more than 89,478,485 pixels"), ((10_000, 10_000), "more than 89,478,485 pixels")],
)
def test_an_image_of_more_pixels_than_memory_is_refused(tmp_path: Path, size: tuple[int, int], problem: str) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(png(*size))
    with pytest.raises(UserError, match=rf"large\.png: this image has {problem}; scale it down"):
        all_images(path)


def all_images(path: Path) -> list[Any]:
    return [image for source in open_image_files(str(path)).values() for image in source.images()]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (npy((10**6, 1000, 1000)), r"the array x has 1,000,000,000,000 bytes, and at most [0-9,]+ are read"),
        (npy((100, 1000, 1000)), "the array x is incomplete: its header gives 100,000,000 bytes, but it has 0"),
        (npy((4, -3, 3), bytes(36)), "the header of the array x cannot be read .it gives negative dimensions"),
        (npy((4, 3, 3), bytes(36), "|O"), "the array x cannot be read .*Object arrays"),
        (npy((4, 3, 3), bytes(36), "nonsense"), "the header of the array x cannot be read"),
        (
            b"\x93NUMPY\x09\x00" + bytes(200),
            "the header of the array x cannot be read .it starts with 93 4e 55 4d 50 59 09 00",
        ),
        (b"{" * 100_000, "the header of the array x cannot be read .it starts with 7b 7b"),
        (b"", "the header of the array x cannot be read .it starts with nothing"),
    ],
)
def test_a_hostile_archive_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    archive(tmp_path / "a.npz", content)
    with pytest.raises(UserError, match=rf"a\.npz: {problem}"):
        all_images(tmp_path / "a.npz")


def test_any_damaged_byte_of_an_archive_gives_a_sentence_or_the_images(tmp_path: Path) -> None:
    content, path = npy((40, 5, 5), drawn(40, 5, 5).tobytes()), tmp_path / "a.npz"
    archive(path, content)
    sentences = []
    for position in range(0, path.stat().st_size, 3):
        archive(path, content, damage=position)
        try:
            all_images(path)
        except UserError as error:
            sentences.append(str(error))
    assert len(sentences) > 100
    assert all("a.npz: " in sentence for sentence in sentences)


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (
            b"\0\0\x08\x03" + struct.pack(">III", 10**6, 1000, 1000),
            r"its array has 1,000,000,000,000 bytes, and at most",
        ),
        (
            b"\0\0\x08\x03" + struct.pack(">III", *[2**32 - 1] * 3),
            "its array has 79,228,162,458,924,105,385,300,197,375",
        ),
        (b"\0\0\x08\xff", "its header gives 255 axes"),
        (
            b"\0\0\x08\x03" + struct.pack(">III", 2, 3, 3),
            "this file is damaged: its header gives 2 x 3 x 3 bytes, .* more",
        ),
        (b"", "this is not an IDX file of bytes; it starts with 00 00 00 00"),
    ],
)
def test_an_idx_file_is_read_as_far_as_its_header_says(tmp_path: Path, head: bytes, problem: str) -> None:
    path = tmp_path / "a-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(head + bytes(50_000_000), 1))
    with pytest.raises(UserError, match=f"ubyte.gz: {problem}"):
        all_images(path)


def test_a_folder_of_images_says_which_files_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    for label in "ab":
        (folder / label).mkdir(parents=True)
        for number, image in enumerate(drawn(20, 4, 4, seed=ord(label))):
            Image.fromarray(image).save(folder / label / f"{number}.png")
    (folder / "notes.txt").write_text("no image")
    lines = opened(folder, tmp_path, batch=32).describe()
    assert f"40 files read of {folder} (a/0.png, a/1.png, a/10.png, ...), 1 not read (notes.txt)" in lines


def test_arrays_of_one_split_are_refused_and_others_told(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_train=drawn(9, 3, 3), train_images=drawn(9, 3, 3))
    with pytest.raises(UserError, match=r"a\.npz: the arrays x_train and train_images are of one split"):
        open_image_files(str(tmp_path / "a.npz"))
    np.savez(tmp_path / "b.npz", x=drawn(30, 3, 3), y=labels_of(30), lables=labels_of(30))
    assert f"{tmp_path / 'b.npz'}: not read: lables" in opened(tmp_path / "b.npz", tmp_path, batch=27).describe()


def test_bytes_as_labels_are_refused(tmp_path: Path) -> None:
    """Not read as the label "b'cat'"."""
    np.savez(tmp_path / "a.npz", x=drawn(9, 3, 3), y=np.array([b"cat", b"dog", b"cow"] * 3))
    with pytest.raises(UserError, match=r"a\.npz: the array y is of type \|S3; save numbers, truth values or texts"):
        opened(tmp_path / "a.npz", tmp_path, batch=27)


def test_labels_of_equal_value_have_one_order() -> None:
    assert sort_labels({"10", "1", "01", "2"}) == ("01", "1", "2", "10")


def image_folders(root: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for number, image in enumerate(drawn(8, 4, 4, seed=seed)):
            Image.fromarray(image).save(root / name / f"{number}.png")
    return root


def test_folders_of_one_name_are_told_to_be_one_class(tmp_path: Path) -> None:
    folder = image_folders(tmp_path / "photos", "cat/indoor", "dog/indoor", "dog/outdoor")
    lines = opened(folder, tmp_path, batch=32).describe()
    assert "label 'indoor': one class of 2 folders (cat/indoor, dog/indoor)" in lines


def test_images_outside_the_folders_of_splits_are_told(tmp_path: Path) -> None:
    """A folder of a class may be called like a split."""
    folder = image_folders(tmp_path / "photos", "train/a", "train/b", "car/a")
    lines = opened(folder, tmp_path, batch=32, valid=0.3).describe()
    note = "8 images outside the folders of splits (train) are read for splits without a folder alone"
    assert any(note in line and "car/a/0.png" in line for line in lines)
