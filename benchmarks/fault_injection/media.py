"""Odd images and recordings: a model sees what the libraries of everybody read, or a sentence names the file."""

import json
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image, ImageOps

from fault_injection import scenarios
from fault_injection.forked_commands import CommandResult
from fault_injection.outcomes import NotRun, Trial, judge
from fault_injection.workshop import Workshop

FAMILY = "media"
CLOSE = 1e-3
"""Probabilities may differ by so much: a recording is rounded in another way, an image is not."""

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


def picture(seed: int) -> Pixels:
    """Colors that are another picture when it is turned."""
    return np.random.default_rng(seed).integers(0, 256, (8, 8, 3)).astype(np.uint8)


def _turned(orientation: int) -> Callable[[Path, Pixels], list[Image.Image]]:
    def write(file: Path, pixels: Pixels) -> list[Image.Image]:
        image = Image.fromarray(pixels)
        exif = image.getexif()
        exif[0x0112] = orientation
        image.save(file, exif=exif)
        with Image.open(file) as stored:
            return [ImageOps.exif_transpose(stored).convert("RGB")]

    return write


def _mode(mode: str) -> Callable[[Path, Pixels], list[Image.Image]]:
    def write(file: Path, pixels: Pixels) -> list[Image.Image]:
        image = Image.fromarray(pixels).convert(mode)
        image.save(file)
        with Image.open(file) as stored:
            return [stored.convert("RGB")]

    return write


def _of_16_bits(file: Path, pixels: Pixels) -> list[Image.Image]:
    """Gray levels of which the upper 8 bits count, with noise in the lower ones."""
    gray = pixels[:, :, 0]
    Image.fromarray(gray.astype(np.uint16) << 8 | pixels[:, :, 1]).save(file)
    return [Image.fromarray(gray).convert("RGB")]


def _without_white(type_: type[np.generic], factor: float) -> Callable[[Path, Pixels], list[Image.Image]]:
    """Numbers that do not say what is white: no picture is right, only a refusal."""

    def write(file: Path, pixels: Pixels) -> list[Image.Image]:
        gray = pixels[:, :, 0].astype(np.float64) * factor
        Image.fromarray(gray.astype(type_)).save(file)
        return []

    return write


def _frames(file: Path, pixels: Pixels) -> list[Image.Image]:
    frames = [Image.fromarray(pixels), Image.fromarray(255 - pixels)]
    frames[0].save(file, save_all=True, append_images=frames[1:])
    with Image.open(file) as stored:
        return [stored.convert("RGB")]


def _palette(file: Path, pixels: Pixels) -> list[Image.Image]:
    image = Image.fromarray(pixels).quantize(16)
    image.save(file, transparency=3)
    with Image.open(file) as stored:
        return [stored.convert("RGB"), stored.convert("RGBA").convert("RGB")]


def _broken(change: Callable[[bytes], bytes]) -> Callable[[Path, Pixels], list[Image.Image]]:
    def write(file: Path, pixels: Pixels) -> list[Image.Image]:
        Image.fromarray(pixels).save(file)
        file.write_bytes(change(file.read_bytes()))
        return []

    return write


def _bomb(width: int, height: int) -> Callable[[Path, Pixels], list[Image.Image]]:
    """A picture whose header announces gigabytes."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    def write(file: Path, pixels: Pixels) -> list[Image.Image]:
        header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        rows = zlib.compress(bytes(10_000_000))
        parts = (chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b""))
        file.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))
        return []

    return write


IMAGES: dict[str, tuple[str, Callable[[Path, Pixels], list[Image.Image]]]] = {
    **{f"orientation {number}": (".png", _turned(number)) for number in range(1, 9)},
    **{f"orientation {number} of a tiff": (".tiff", _turned(number)) for number in (3, 6)},
    "an orientation that is none": (".png", _turned(77)),
    **{f"mode {mode}": (".png", _mode(mode)) for mode in ("L", "1")},
    "mode CMYK": (".tiff", _mode("CMYK")),
    "mode YCbCr": (".jpg", _mode("YCbCr")),
    "a palette with transparency": (".png", _palette),
    "two frames": (".gif", _frames),
    "16 bits": (".png", _of_16_bits),
    "32 bits": (".tiff", _without_white(np.int32, 300)),
    "32 bits with levels of 8": (".tiff", _without_white(np.int32, 1)),
    "numbers from 0 to 1": (".tiff", _without_white(np.float32, 1 / 255)),
    "numbers from 0 to 255": (".tiff", _without_white(np.float32, 1)),
    "half of it": (".png", _broken(lambda content: content[: len(content) // 2])),
    "a flipped byte": (".png", _broken(lambda content: content[:50] + bytes([content[50] ^ 255]) + content[51:])),
    "nothing in it": (".png", _broken(lambda content: b"")),
    "text in it": (".png", _broken(lambda content: b"no picture")),
    "100,000 x 100,000": (".png", _bomb(100_000, 100_000)),
    "2^31 - 1 x 1": (".png", _bomb(2**31 - 1, 1)),
    "20,000 x 20,000": (".png", _bomb(20_000, 20_000)),
    "no width": (".png", _bomb(0, 8)),
}

Wave = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


def _stored(suffix: str, **options: str) -> tuple[str, Callable[[Path, Wave], Wave | None]]:
    def write(file: Path, wave: Wave) -> Wave:
        soundfile.write(file, wave, scenarios.RATE, **options)
        return wave

    return suffix, write


def _wave(change: Callable[[Wave], Wave], *, same: bool) -> tuple[str, Callable[[Path, Wave], Wave | None]]:
    def write(file: Path, wave: Wave) -> Wave | None:
        changed = change(wave)
        soundfile.write(file, changed, scenarios.RATE, subtype="FLOAT")
        return changed if same else None

    return ".wav", write


def _bytes(change: Callable[[bytes], bytes]) -> tuple[str, Callable[[Path, Wave], Wave | None]]:
    def write(file: Path, wave: Wave) -> None:
        soundfile.write(file, wave, scenarios.RATE)
        file.write_bytes(change(file.read_bytes()))

    return ".wav", write


def _with_value(value: float) -> Callable[[Wave], Wave]:
    def change(wave: Wave) -> Wave:
        changed = wave.copy()
        changed[100] = value
        return changed

    return change


SOUNDS: dict[str, tuple[str, Callable[[Path, Wave], Wave | None]]] = {
    "24 bits": _stored(".wav", subtype="PCM_24"),
    "32 bits": _stored(".wav", subtype="PCM_32"),
    "float": _stored(".wav", subtype="FLOAT"),
    "double": _stored(".wav", subtype="DOUBLE"),
    "flac": _stored(".flac"),
    "two equal channels": _wave(lambda wave: np.stack([wave, wave], 1), same=True),
    "two channels of opposite phase": _wave(lambda wave: np.stack([wave, -wave], 1), same=False),
    "a whisper that rounds to nothing": _wave(lambda wave: wave * 1e-6, same=False),
    "not a number": _wave(_with_value(float("nan")), same=False),
    "infinity": _wave(_with_value(float("inf")), same=False),
    "a peak of 10^30": _wave(_with_value(1e30), same=False),
    "no samples": _wave(lambda wave: wave[:0], same=False),
    "one sample": _wave(lambda wave: wave[:1], same=False),
    "a thousand channels": _wave(lambda wave: np.repeat(wave[:, None], 1000, 1), same=True),
    "half of it": _bytes(lambda content: content[: len(content) // 2]),
    "nothing in it": _bytes(lambda content: b""),
    "text in it": _bytes(lambda content: b"no sound"),
    "a length that is a lie": _bytes(lambda content: content[:40] + b"\xff\xff\xff\x7f" + content[44:]),
    "a rate of 0": _bytes(lambda content: content[:24] + bytes(4) + content[28:]),
    "a rate of 2^31": _bytes(lambda content: content[:24] + b"\xff\xff\xff\x7f" + content[28:]),
}


def carry_out(workshop: Workshop, number: int) -> Trial | NotRun:
    """An odd picture or recording is labelled as the plain one that the reference reader makes of it."""
    is_sound, turn = number % 3 == 2, number // 3 * 2 + number % 3
    if is_sound:
        return _sound(workshop, number, sorted(SOUNDS)[number // 3 % len(SOUNDS)])
    return _picture(workshop, number, sorted(IMAGES)[turn % len(IMAGES)])


def _picture(workshop: Workshop, number: int, deed: str) -> Trial:
    workshop.set_up(scenarios.PICTURES, finished=True)
    suffix, write = IMAGES[deed]
    file = workshop.here / f"odd{suffix}"
    references = write(file, picture(number))
    began = time.monotonic()
    result = workshop.run(("predict", "run", file.name, "--json"))
    same: bool | None = None
    if result.code == 0:
        same = False
        for image in references:
            image.save(workshop.here / "plain.png")
            same = same or _alike(result, workshop.run_undisturbed(("predict", "run", "plain.png", "--json")))
    outcome, detail = judge(result, {file.name}, same=same)
    return Trial(FAMILY, number, f"picture: {deed}", outcome, str(result), detail, time.monotonic() - began)


def _sound(workshop: Workshop, number: int, deed: str) -> Trial:
    workshop.set_up(scenarios.SOUNDS, finished=True)
    suffix, write = SOUNDS[deed]
    file = workshop.here / f"odd{suffix}"
    noise = np.random.default_rng(number).normal(0, 0.01, 2000).astype(np.float32)
    reference = write(file, scenarios.tone(300 + 50 * (number % 20), 0.25) + noise)
    began = time.monotonic()
    result = workshop.run(("predict", "run", file.name, "--json"))
    same: bool | None = None
    if result.code == 0:
        same = False
        if reference is not None:
            mono = reference if reference.ndim == 1 else reference.mean(1)
            soundfile.write(workshop.here / "plain.wav", mono, scenarios.RATE)
            same = _alike(result, workshop.run_undisturbed(("predict", "run", "plain.wav", "--json")))
    outcome, detail = judge(result, {file.name}, same=same)
    return Trial(FAMILY, number, f"recording: {deed}", outcome, str(result), detail, time.monotonic() - began)


def _alike(result: CommandResult, reference: CommandResult) -> bool:
    """Whether two inputs have the same labels with nearly the same probabilities."""
    first, second = (_probabilities(each) for each in (result, reference))
    return first.keys() == second.keys() and all(abs(first[label] - second[label]) < CLOSE for label in first)


def _probabilities(result: CommandResult) -> dict[str, float]:
    lines = [line for line in result.output.splitlines() if line.startswith("{")]
    return {label["label"]: label["probability"] for line in lines for label in json.loads(line)["labels"]}
