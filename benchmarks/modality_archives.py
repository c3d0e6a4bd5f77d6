"""Make archives of digits that are seen, heard and described, from MNIST and the Free Spoken Digit Dataset.

    python benchmarks/modality_archives.py captions mnist.npz captions.npz
    python benchmarks/modality_archives.py fusion mnist.npz spoken_digits.npz fusion.npz
    python benchmarks/modality_archives.py pairs mnist.npz spoken_digits.npz pairs.npz

`captions` are pictures of two digits with their places in words. `fusion` pairs an image with a recording of the same
digit, each degraded by noise; `pairs` leaves both as they are. mnist.npz has arrays train_x, train_y, test_x, test_y;
spoken_digits.npz has samples (8-bit mu-law at 8,000 Hz), lengths, digit and take, and takes 0 to 4 are its test set.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIDE, DIGIT = 40, 20
"""The height and width of a picture of two digits, and of a digit in it."""
TRAIN_PICTURES, VALID_PICTURES, TEST_PICTURES = 40_000, 1_000, 2_000
TRAIN_PAIRS, VALID_PAIRS, TEST_PAIRS = 12_000, 1_000, 1_500
SOUND_TEST_TAKES = 5
SAMPLE_RATE = 8000


def main() -> None:
    """Make the archive that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, make, sources in (
        ("captions", make_captions, ("mnist",)),
        ("fusion", make_fusion, ("mnist", "spoken")),
        ("pairs", make_pairs, ("mnist", "spoken")),
    ):
        command = commands.add_parser(name)
        for source in sources:
            command.add_argument(source, type=Path)
        command.add_argument("out", type=Path)
        command.set_defaults(make=make, sources=sources)
    chosen = parser.parse_args()
    arrays = chosen.make(*(np.load(getattr(chosen, source)) for source in chosen.sources))
    with chosen.out.open("wb") as file:
        np.savez(file, **cast(dict[str, Any], arrays))
    print(f"{chosen.out}: " + ", ".join(f"{name} {array.dtype}{array.shape}" for name, array in arrays.items()))


def make_captions(mnist: Any) -> dict[str, NDArray[Any]]:
    """Pictures of two digits that do not overlap, with captions such as "seven above left of three"."""
    random = np.random.default_rng(0)
    train = _digits(mnist["train_x"]), mnist["train_y"]
    test = _digits(mnist["test_x"]), mnist["test_y"]
    counts = {"train": TRAIN_PICTURES, "valid": VALID_PICTURES, "test": TEST_PICTURES}
    pictures, captions = list[NDArray[np.uint8]](), list[str]()
    for split, count in counts.items():
        # the digits of validation pictures are the last tenth of the training digits
        pool = test if split == "test" else train
        bounds = {"train": (0, 54_000), "valid": (54_000, 60_000), "test": (0, 10_000)}[split]
        for _ in range(count):
            first, second = random.integers(*bounds, 2)
            picture, place = _two_digits(pool[0][first], pool[0][second], random)
            pictures.append(picture)
            captions.append(f"{NAMES[pool[1][first]]} {place} {NAMES[pool[1][second]]}")
    return {"images": np.stack(pictures), "texts": np.array(captions), **_splits(counts)}


def _digits(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The middle 20 x 20 pixels, in which every digit of MNIST is."""
    return images[:, 4:24, 4:24]


def _two_digits(
    first: NDArray[np.uint8], second: NDArray[np.uint8], random: np.random.Generator
) -> tuple[NDArray[np.uint8], str]:
    """A picture with both digits, and where the first is, seen from the second.

    The first is above the second, or on its left in the same row, so that every picture has one caption."""
    picture = np.zeros((SIDE, SIDE), dtype=np.uint8)
    corners = [(row, column) for row in (0, DIGIT) for column in (0, DIGIT)]
    (row, column), (other_row, other_column) = (corners[i] for i in np.sort(random.permutation(4)[:2]))
    picture[row : row + DIGIT, column : column + DIGIT] = first
    picture[other_row : other_row + DIGIT, other_column : other_column + DIGIT] = second
    vertical = "above" if row < other_row else ""
    horizontal = {-1: "left of", 0: "", 1: "right of"}[int(np.sign(column - other_column))]
    return picture, f"{vertical} {horizontal}".strip()


def make_fusion(mnist: Any, spoken: Any) -> dict[str, NDArray[Any]]:
    """Images and recordings of the same digits, each with so much noise that neither is enough."""
    return _paired(mnist, spoken, _blurred_images, _noisy_samples)


def make_pairs(mnist: Any, spoken: Any) -> dict[str, NDArray[Any]]:
    """Images and recordings of the same digits."""
    return _paired(mnist, spoken, lambda images, random: images, lambda samples, lengths, random: samples)


def _paired(
    mnist: Any,
    spoken: Any,
    degrade_images: Callable[[NDArray[np.uint8], np.random.Generator], NDArray[np.uint8]],
    degrade_samples: Callable[[NDArray[np.int16], NDArray[np.int64], np.random.Generator], NDArray[np.int16]],
) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(1)
    is_test = np.asarray(spoken["take"]) < SOUND_TEST_TAKES
    recordings = {"train": np.flatnonzero(~is_test), "test": np.flatnonzero(is_test)}
    # validation recordings are the last tenth of the training takes, and no recording is in two splits
    shuffled = random.permutation(recordings["train"])
    recordings["train"], recordings["valid"] = shuffled[270:], shuffled[:270]
    bounds = {"train": (0, 54_000), "valid": (54_000, 60_000), "test": (60_000, 70_000)}
    digits = np.concatenate([mnist["train_y"], mnist["test_y"]]).astype(np.int64)
    pictures = np.concatenate([mnist["train_x"], mnist["test_x"]])
    counts = {"train": TRAIN_PAIRS, "valid": VALID_PAIRS, "test": TEST_PAIRS}
    images, sounds, labels = (list[NDArray[np.int64]]() for _ in range(3))
    for split, count in counts.items():
        chosen = random.integers(*bounds[split], count)
        spoken_digits = np.asarray(spoken["digit"])[recordings[split]]
        images.append(chosen)
        sounds.append(np.array([random.choice(recordings[split][spoken_digits == digits[i]]) for i in chosen]))
        labels.append(digits[chosen])
    index = np.concatenate(images)
    lengths = np.asarray(spoken["lengths"]).astype(np.int64)
    return {
        "images": degrade_images(pictures[index], random),
        "samples": degrade_samples(_linear(np.asarray(spoken["samples"])), lengths, random),
        "lengths": lengths,
        "sample_rate": np.array(SAMPLE_RATE),
        "sound_index": np.concatenate(sounds),
        "labels": np.concatenate(labels),
        "label_names": np.array(NAMES),
        **_splits(counts),
    }


def _linear(codes: NDArray[np.uint8]) -> NDArray[np.int16]:
    """16-bit samples of 8-bit mu-law codes."""
    levels = np.arange(256) / 127.5 - 1
    table = np.sign(levels) * (256.0 ** np.abs(levels) - 1) / 255
    linear: NDArray[np.int16] = np.round(table * 32767).astype(np.int16)[codes]
    return linear


def _blurred_images(images: NDArray[np.uint8], random: np.random.Generator) -> NDArray[np.uint8]:
    """A window of 18 x 18 pixels with half of the contrast under noise, and noise alone around it."""
    noisy = images * 0.5 + random.normal(64, 60, images.shape)
    for image, row, column in zip(noisy, *random.integers(0, 11, (2, len(images))), strict=True):
        visible = image[row : row + 18, column : column + 18].copy()
        image[:] = random.normal(64, 60, image.shape)
        image[row : row + 18, column : column + 18] = visible
    return noisy.clip(0, 255).astype(np.uint8)


def _noisy_samples(
    samples: NDArray[np.int16], lengths: NDArray[np.int64], random: np.random.Generator
) -> NDArray[np.int16]:
    """White noise of two and a half times the amplitude (8 dB) of each recording."""
    starts = lengths.cumsum() - lengths
    power = np.add.reduceat(np.square(samples.astype(np.float64)), starts) / lengths
    strength = np.repeat(2.5 * np.sqrt(power), lengths)
    noisy = samples + strength * random.normal(size=len(samples))
    scale = 32767 / np.repeat(np.maximum(32767, np.maximum.reduceat(np.abs(noisy), starts)), lengths)
    return np.round(noisy * scale).astype(np.int16)


def _splits(counts: dict[str, int]) -> dict[str, NDArray[np.int64]]:
    stops = np.cumsum(list(counts.values()))
    return {name: np.arange(stop - counts[name], stop) for name, stop in zip(counts, stops, strict=True)}


if __name__ == "__main__":
    main()
