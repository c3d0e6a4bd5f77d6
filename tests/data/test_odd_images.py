"""Odd image files, drawn by a seeded generator: the pixels of Pillow, changes told, or a refusal with the name."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from manyformer.base.errors import UserError
from manyformer.config import ImagesData
from manyformer.data import open_data
from manyformer.data.images.image_reading import CHANGES, decode_image

ORIENTATION = 0x0112
Drawer = np.random.Generator


def noise(draw: Drawer, *shape: int, dtype: Any = np.uint8) -> NDArray[Any]:
    return draw.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


def size(draw: Drawer) -> tuple[int, int]:
    """A height and a width: small, a single pixel, or extreme."""
    choices = [(1, 1), (1, 300), (300, 1), (7, 5), (16, 16), (33, 12)]
    return choices[draw.integers(len(choices))]


def rgb(draw: Drawer) -> Image.Image:
    return Image.fromarray(noise(draw, *size(draw), 3))


def palette(draw: Drawer) -> Image.Image:
    return rgb(draw).quantize(int(draw.integers(2, 200)))


def saved(image: Image.Image, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def turned(draw: Drawer, form: str) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = int(draw.integers(1, 9))
    return saved(rgb(draw), form, exif=exif)


def interlaced_png(draw: Drawer) -> bytes:
    """A gray PNG in the seven passes of Adam7, which Pillow reads but does not write."""
    height, width = size(draw)
    pixels = noise(draw, height, width)
    raw = b""
    for top, left, down, right in (
        (0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1),
    ):  # fmt: skip
        for row in pixels[top::down, left::right]:
            raw += b"\0" + row.tobytes() if len(row) else b""
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 1)),
        (b"IDAT", zlib.compress(raw)),
        (b"IEND", b""),
    )
    joined = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(joined)


def frames(draw: Drawer, form: str) -> bytes:
    shape = size(draw)
    images = [Image.fromarray(noise(draw, *shape, 3)) for _ in range(3)]
    return saved(images[0], form, save_all=True, append_images=images[1:])


def clear_palette(draw: Drawer, form: str) -> bytes:
    return saved(palette(draw), form, transparency=0)


KINDS: dict[str, Callable[[Drawer], bytes]] = {
    "gray.png": lambda draw: saved(Image.fromarray(noise(draw, *size(draw))), "PNG"),
    "bits.png": lambda draw: saved(Image.fromarray(noise(draw, *size(draw)) > 127), "PNG"),
    "bits.tif": lambda draw: saved(Image.fromarray(noise(draw, *size(draw)) > 127), "TIFF", compression="group4"),
    "bits.pbm": lambda draw: saved(Image.fromarray(noise(draw, *size(draw)) > 127), "PPM"),
    "color.png": lambda draw: saved(rgb(draw), "PNG"),
    "color.bmp": lambda draw: saved(rgb(draw), "BMP"),
    "color.ppm": lambda draw: saved(rgb(draw), "PPM"),
    "color.webp": lambda draw: saved(rgb(draw), "WEBP"),
    "lossless.webp": lambda draw: saved(rgb(draw), "WEBP", lossless=True),
    "color.jpg": lambda draw: saved(rgb(draw), "JPEG"),
    "progressive.jpg": lambda draw: saved(rgb(draw), "JPEG", progressive=True),
    "gray.jpg": lambda draw: saved(rgb(draw).convert("L"), "JPEG"),
    "cmyk.jpg": lambda draw: saved(rgb(draw).convert("CMYK"), "JPEG"),
    "cmyk.tif": lambda draw: saved(rgb(draw).convert("CMYK"), "TIFF"),
    "lzw.tif": lambda draw: saved(rgb(draw), "TIFF", compression="tiff_lzw"),
    "clear.png": lambda draw: saved(Image.fromarray(noise(draw, *size(draw), 4)), "PNG"),
    "clear.tif": lambda draw: saved(Image.fromarray(noise(draw, *size(draw), 4)), "TIFF"),
    "clear.webp": lambda draw: saved(Image.fromarray(noise(draw, *size(draw), 4)), "WEBP", lossless=True),
    "clear-gray.png": lambda draw: saved(Image.fromarray(noise(draw, *size(draw), 4)).convert("LA"), "PNG"),
    "clear-color.png": lambda draw: saved(rgb(draw), "PNG", transparency=(1, 2, 3)),
    "palette.png": lambda draw: saved(palette(draw), "PNG"),
    "palette.gif": lambda draw: saved(palette(draw), "GIF"),
    "palette.bmp": lambda draw: saved(palette(draw), "BMP"),
    "palette.tif": lambda draw: saved(palette(draw), "TIFF"),
    "clear-palette.png": lambda draw: clear_palette(draw, "PNG"),
    "clear-palette.gif": lambda draw: clear_palette(draw, "GIF"),
    "half-clear-palette.png": lambda draw: saved(palette(draw), "PNG", transparency=bytes(noise(draw, 2))),
    "turned.jpg": lambda draw: turned(draw, "JPEG"),
    "turned.png": lambda draw: turned(draw, "PNG"),
    "turned.tif": lambda draw: turned(draw, "TIFF"),
    "turned.webp": lambda draw: turned(draw, "WEBP"),
    "frames.gif": lambda draw: frames(draw, "GIF"),
    "frames.tif": lambda draw: frames(draw, "TIFF"),
    "frames.png": lambda draw: frames(draw, "PNG"),
    "frames.webp": lambda draw: frames(draw, "WEBP"),
    "frames.jpg": lambda draw: frames(draw, "MPO"),
    "interlaced.png": interlaced_png,
    # what it is decides, not how it is called
    "png-called.jpg": lambda draw: saved(rgb(draw), "PNG"),
    "jpeg-called.png": lambda draw: saved(rgb(draw), "JPEG"),
}


def reference(content: bytes) -> NDArray[np.uint8]:
    """The pixels as transformers loads them: turned, and converted to RGB; gray ones with one channel."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(content)))
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_pixels_are_those_of_pillow(tmp_path: Path, name: str) -> None:
    for seed in range(4):
        content = KINDS[name](np.random.default_rng([seed, len(name)]))
        (tmp_path / name).write_bytes(content)
        pixels, changes = decode_image(tmp_path / name)
        expected = reference(content)
        assert pixels.dtype == np.uint8
        np.testing.assert_array_equal(pixels, expected)
        assert set(changes) <= set(CHANGES)
        assert ("frames" in changes) == name.startswith("frames")
        assert ("cmyk" in changes) == name.startswith("cmyk")
        if not name.startswith(("clear", "half", "turned")):
            assert not {"transparent", "turned"} & set(changes)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_every_orientation_is_turned(tmp_path: Path, form: str, orientation: int) -> None:
    upright = np.zeros((16, 24), dtype=np.uint8)
    upright[:8, :8] = 255
    turns: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
        1: lambda a: a,
        2: lambda a: a[:, ::-1],
        3: lambda a: a[::-1, ::-1],
        4: lambda a: a[::-1],
        5: lambda a: a.T,
        6: lambda a: np.rot90(a, -1),
        7: lambda a: a[::-1, ::-1].T,
        8: lambda a: np.rot90(a, 1),
    }
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / f"photo.{form.lower()}"
    options: dict[str, Any] = {"lossless": True} if form == "WEBP" else {}
    path.write_bytes(saved(Image.fromarray(upright), form, exif=exif, **options))
    pixels, changes = decode_image(path)
    gray = pixels if pixels.ndim == 2 else pixels[..., 0]
    # a JPEG is not exact
    np.testing.assert_array_equal(gray > 127, turns[orientation](upright) > 127)
    assert ("turned" in changes) == (orientation > 1)


@pytest.mark.parametrize(
    ("name", "array", "expected"),
    [
        ("deep.png", np.array([[0, 65535], [32768, 257]], np.uint16), [[0, 255], [128, 1]]),
        ("deep.tif", np.array([[0, 65535], [32768, 257]], np.uint16), [[0, 255], [128, 1]]),
        ("deep.pgm", np.array([[0, 65535], [32768, 257]], np.uint16), [[0, 255], [128, 1]]),
        ("wide.tif", np.array([[0, 70000], [131072, 65535]], np.int32), "integers of 32 bits or with signs"),
        ("levels.tif", np.array([[0, 255], [128, 64]], np.int32), "integers of 32 bits or with signs"),
        ("numbers.tif", np.array([[0, 1], [0.5, 0.25]], np.float32), "floating point numbers"),
    ],
)
def test_deep_pixels_are_scaled_or_refused(tmp_path: Path, name: str, array: NDArray[Any], expected: Any) -> None:
    path = tmp_path / name
    Image.fromarray(array).save(path)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=rf"{name}: the pixels of this image are {expected}, .* with 8 or 16 bits"):
            decode_image(path)
    else:
        pixels, changes = decode_image(path)
        assert pixels.tolist() == expected
        assert changes == ("deep",)


def test_pixels_of_another_kind_are_refused(tmp_path: Path) -> None:
    Image.frombytes("LAB", (3, 2), bytes(18)).save(tmp_path / "a.tif")
    with pytest.raises(UserError, match=r"a\.tif: the pixels of this image are of mode LAB, which is not read"):
        decode_image(tmp_path / "a.tif")


def test_deep_colors_have_the_rule_of_deep_grays(tmp_path: Path) -> None:
    """A PNG of 48 bits a pixel, which Pillow reads but does not write."""
    levels = np.random.default_rng(0).integers(0, 1 << 16, (3, 5, 3), dtype=np.uint16).astype(">u2")
    raw = b"".join(b"\0" + row.tobytes() for row in levels)
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", 5, 3, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
    joined = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
    (tmp_path / "deep.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(joined))
    pixels, changes = decode_image(tmp_path / "deep.png")
    np.testing.assert_array_equal(pixels, levels >> 8)
    assert changes == ("deep",)


@pytest.mark.parametrize(
    ("image", "opaque", "options"),
    [
        (Image.fromarray(np.dstack([np.full((2, 2), 9, np.uint8)] * 3 + [np.full((2, 2), 255, np.uint8)])), True, {}),
        (Image.fromarray(np.dstack([np.full((2, 2), 9, np.uint8)] * 4)), False, {}),
        (Image.fromarray(np.full((2, 2, 3), 9, np.uint8)), True, {"transparency": (1, 1, 1)}),
        (Image.fromarray(np.full((2, 2, 3), 9, np.uint8)), False, {"transparency": (9, 9, 9)}),
    ],
)
def test_transparency_is_told_where_a_pixel_has_some(
    tmp_path: Path, image: Image.Image, opaque: bool, options: dict[str, Any]
) -> None:
    image.save(tmp_path / "a.png", **options)
    pixels, changes = decode_image(tmp_path / "a.png")
    assert (pixels == 9).all()
    assert changes == (() if opaque else ("transparent",))


def test_a_profile_of_other_colors_is_told(tmp_path: Path) -> None:
    from PIL import ImageCms

    image = Image.fromarray(np.full((2, 2, 3), 9, np.uint8))
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    other = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    image.save(tmp_path / "a.png", icc_profile=srgb)
    assert decode_image(tmp_path / "a.png").changes == ()
    image.save(tmp_path / "a.png", icc_profile=other)
    assert decode_image(tmp_path / "a.png").changes == ("profile",)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_a_file_that_is_cut_off_is_refused_or_whole(tmp_path: Path, name: str) -> None:
    content = KINDS[name](np.random.default_rng(7))
    expected, path = reference(content), tmp_path / name
    refused = 0
    for share in (0.0, 0.1, 0.3, 0.5, 0.7, 0.9):
        path.write_bytes(content[: int(len(content) * share)])
        try:
            pixels, _ = decode_image(path)
        except UserError as error:
            refused += name in str(error)
        else:
            np.testing.assert_array_equal(pixels, expected, err_msg=f"{share:.0%} of {name}")
    assert refused >= 2


@pytest.mark.parametrize(
    "content", [b"", b"nothing", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    """Above all PostScript, which Pillow gives to a program."""
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(UserError, match=r"a\.png: Pillow cannot read this image"):
        decode_image(tmp_path / "a.png")


def test_what_is_changed_is_told_with_the_first_place(tmp_path: Path) -> None:
    draw, exif = np.random.default_rng(0), Image.Exif()
    exif[ORIENTATION] = 6
    for number in range(16):
        folder = tmp_path / "photos" / ("cat" if number % 2 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {"exif": exif} if number in (5, 7, 8) else {}
        Image.fromarray(noise(draw, 4, 4, 3)).save(folder / f"{number:02}.png", **options)
    data = ImagesData(path=str(tmp_path / "photos"), valid=0.3)
    opened = open_data(data, "labelled", batch_tokens=96, cache=tmp_path / "cache", seed=0)
    message = f"3 images turned as the EXIF orientation says (first: {tmp_path}/photos/cat/05.png)"
    assert message in opened.describe()
    # also when the prepared images are read again
    again = open_data(data, "labelled", batch_tokens=96, cache=tmp_path / "cache", seed=0)
    assert message in again.describe()
