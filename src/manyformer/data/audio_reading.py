"""Recordings as samples of a file: read, averaged over channels, and resampled."""

import math
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from manyformer.data.splits import DataSource
from manyformer.errors import UserError, list_names

SampleArray = NDArray[np.float32]
"""Samples from -1 to 1."""
GroupTest = Callable[[str | None], bool]
"""Whether recordings of a group, None for those without one, are selected."""

AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3"})
"""Suffixes of the recordings that are read from a folder."""

INT16_SCALE = 1 << 15
MAX_SECONDS = 3600
"""The longest recording that is read, in seconds."""
_RIFF_HEADER = 8
# what a program writes that does not know the size yet
_UNKNOWN_SIZES = frozenset({0, 0xFFFFFFFF})


class Recording(NamedTuple):
    """A recording with samples (n, channels), its label or text, the value of its group, and its location."""

    samples: SampleArray
    rate: int
    target: str | None
    group: str | None
    location: str


def every_group(group: str | None) -> bool:
    """Select the recordings of all groups."""
    return True


class RecordingSource(DataSource):
    """Recordings of a file or folder in a fixed order."""

    @abstractmethod
    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        """Stream the recordings in order whose group is one that `selects` accepts; samples of others are not read."""


@final
class SelectedRecordings(RecordingSource):
    """The recordings of a source whose group is one of the values, or none of them if they are `excluded`.

    Reading all of them raises UserError for a value that no recording has."""

    def __init__(self, source: RecordingSource, values: tuple[str, ...], *, excluded: bool = False) -> None:
        self._source, self._values, self._excluded = source, values, excluded
        self.name = source.name

    def stamp(self) -> list[str | int]:
        return [*self._source.stamp(), "without" if self._excluded else "with", *self._values]

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        groups = set()

        def selects_values(group: str | None) -> bool:
            groups.add(str(group))
            return (group in self._values) != self._excluded and selects(group)

        yield from self._source.recordings(selects_values)
        if missing := [value for value in self._values if value not in groups]:
            values = list_names(sorted(groups))
            raise UserError(f"{self.name}: no recording is of group {missing[0]!r} (data.group); there are {values}")


class RecordingConverter:
    """Converts recordings to one channel of 16-bit samples at one rate, and counts what it changes.

    Channels are averaged. Other rates are resampled by a polyphase filter (scipy's, with a Kaiser window), which may
    exceed the range of samples a little: it is limited there, as are floating point samples beyond it."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self.rates = Counter[int]()
        self.mixed = self.limited = self.silent = 0

    def convert(self, recording: Recording) -> NDArray[np.int16]:
        """The samples of a recording. Raises UserError for one without samples, or with numbers that are not finite."""
        samples, rate, location = recording.samples, recording.rate, recording.location
        if not len(samples):
            raise UserError(f"{location}: this recording has no samples; leave it out")
        invalid = ~np.isfinite(samples).all(1)
        if invalid.any():
            raise UserError(f"{location}: sample {int(invalid.argmax()):,} of this recording is not a finite number")
        self.mixed += samples.shape[1] > 1
        mono = samples.mean(1, dtype=np.float32)
        peak = float(np.abs(mono).max())
        self.limited += peak > 1
        self.silent += peak == 0
        if rate != self.sample_rate:
            self.rates[rate] += 1
            divisor = math.gcd(rate, self.sample_rate)
            mono = _resample(mono, self.sample_rate // divisor, rate // divisor)
        levels = np.clip(np.rint(mono * INT16_SCALE), -INT16_SCALE, INT16_SCALE - 1)
        stored: NDArray[np.int16] = levels.astype(np.int16)
        return stored

    def counts(self) -> dict[str, int | dict[str, int]]:
        """What was changed: the numbers of recordings of other rates, with several channels, limited and silent."""
        rates = {str(rate): count for rate, count in sorted(self.rates.items())}
        return {"resampled": rates, "mixed": self.mixed, "limited": self.limited, "silent": self.silent}


def describe_changes(counts: dict[str, Any], sample_rate: int) -> Iterator[str]:
    """Lines for a person about what a converter has changed."""
    for rate, count in counts["resampled"].items():
        yield f"resampled: {count:,} recordings from {int(rate):,} Hz to {sample_rate:,} Hz"
    if counts["mixed"]:
        yield f"channels averaged: {counts['mixed']:,} recordings"
    if counts["limited"]:
        yield f"limited to the range of -1 to 1: {counts['limited']:,} recordings"
    if counts["silent"]:
        yield f"silent throughout: {counts['silent']:,} recordings"


def decode_mu_law(codes: NDArray[np.uint8]) -> SampleArray:
    """The samples of 8-bit codes of ITU-T G.711's continuous mu-law: ((256)^|m| - 1) / 255 for m = code / 127.5 - 1."""
    levels = np.arange(256) / 127.5 - 1
    table = np.sign(levels) * (256.0 ** np.abs(levels) - 1) / 255
    decoded: SampleArray = table.astype(np.float32)[codes]
    return decoded


def read_audio_file(path: Path) -> tuple[SampleArray, int]:
    """The samples (n, channels) of a file and their rate. Raises UserError for a damaged or unknown file."""
    soundfile = import_soundfile()
    _check_complete(path)
    try:
        with soundfile.SoundFile(path) as file:
            if file.frames > MAX_SECONDS * file.samplerate:
                raise UserError(f"{path}: this recording takes more than {MAX_SECONDS:,} seconds; split it")
            samples: SampleArray = file.read(dtype="float32", always_2d=True)
            declared, rate = file.frames, int(file.samplerate)
    except (soundfile.SoundFileError, OSError, MemoryError, ValueError) as error:
        raise UserError(f"{path}: this recording cannot be read ({error})") from error
    if len(samples) != declared:
        raise UserError(f"{path}: this file is incomplete: {len(samples):,} of {declared:,} samples can be read")
    return samples, rate


def import_soundfile() -> Any:
    """The package soundfile. Raises UserError if it is not installed."""
    try:
        import soundfile
    except ImportError:
        raise UserError("reading recordings needs soundfile: pip install 'manyformer[audio]'") from None
    return soundfile


def _check_complete(path: Path) -> None:
    """Raise UserError for a wav file that is shorter than its header says, which soundfile would read as it is."""
    with path.open("rb") as file:
        header = file.read(_RIFF_HEADER)
    declared = int.from_bytes(header[4:], "little")
    actual = path.stat().st_size - _RIFF_HEADER
    if header[:4] == b"RIFF" and declared not in _UNKNOWN_SIZES and declared > actual:
        raise UserError(
            f"{path}: this file is incomplete: its header gives {declared:,} bytes, but it has {max(0, actual):,}"
        )


def _resample(samples: SampleArray, up: int, down: int) -> SampleArray:
    try:
        from scipy.signal import resample_poly
    except ImportError:
        raise UserError("resampling needs scipy: pip install 'manyformer[audio]'") from None
    resampled: SampleArray = resample_poly(samples, up, down).astype(np.float32)
    return resampled
