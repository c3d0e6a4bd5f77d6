"""Recordings as samples of a file: read, averaged over channels, and resampled."""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from manyformer.base.errors import UserError, list_names
from manyformer.config.data_sections.untokenized_sections import MAX_RATE, MIN_RATE
from manyformer.data.pipeline.splits import DataSource
from manyformer.data.pipeline.summary import ChangeCounts, Finding, Tally, change_findings, plural

SampleArray = NDArray[np.float32]
"""Samples from -1 to 1."""
GroupTest = Callable[[str | None], bool]
"""Whether recordings of a group, None for those without one, are selected."""

AUDIO_SUFFIXES = frozenset({".wav", ".flac", ".ogg", ".opus", ".mp3"})
"""Suffixes of the recordings that are read from a folder."""

CHANGES = {
    "mixed": "with channels averaged",
    "limited": "limited to the range of -1 to 1",
    "silent": "silent throughout (in 16 bits)",
}
"""Changes of recordings besides their rates, in words for a person that follow their number."""

INT16_SCALE = 1 << 15
MAX_SECONDS = 3600
"""The longest recording that is read, in seconds."""
FORMATS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "FLAC", "OGG", "MP3")
"""The formats that are read, by content and whatever the name: those of which a file that is cut off is noticed."""
_RIFF_HEADER = 8
_MAX_OUTER_HEADER = 28
# what a program writes that does not know the size yet
_UNKNOWN_SIZES = frozenset({0, 0xFFFFFFFF})
_MAX_CHUNKS = 1000
"""The most chunks of a wav file before its samples."""
_OGG_PAGE = b"OggS"
_OGG_END = 4
_MAX_OGG_PAGE = 65_307
"""How a page of ogg begins, the flag of the last page of a stream, and the bytes of the largest page."""


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
        self._source = source
        self._values = values
        self._excluded = excluded
        self.name = source.name
        self.notes = source.notes

    def found(self) -> Iterator[Finding]:
        return self._source.found()

    def stamp(self) -> list[str | int]:
        return [*self._source.stamp(), "without" if self._excluded else "with", *self._values]

    def recordings(self, selects: GroupTest = every_group) -> Iterator[Recording]:
        groups = set()

        def selects_values(group: str | None) -> bool:
            # noted also for recordings of other groups: at the end a value that never occurred is a mistake
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
        self._rates = defaultdict[int, Tally](Tally)
        self._changes = ChangeCounts()

    def convert(self, recording: Recording) -> NDArray[np.int16]:
        """The samples of a recording. Raises UserError for one without samples, or with numbers that are not finite."""
        samples = recording.samples
        rate = recording.rate
        location = recording.location
        if not len(samples):
            raise UserError(f"{location}: this recording has no samples; leave it out")
        invalid = ~np.isfinite(samples).all(1)
        if invalid.any():
            raise UserError(f"{location}: sample {int(invalid.argmax()):,} of this recording is not a finite number")
        # averaged before resampling, which is many times slower
        mono = samples.mean(1, dtype=np.float32)
        if rate != self.sample_rate:
            self._rates[rate].add(location)
            divisor = math.gcd(rate, self.sample_rate)
            mono = _resample(mono, self.sample_rate // divisor, rate // divisor)
        # 16 bits are half of the disk that floats take, and what most recordings have
        levels = np.clip(np.rint(mono * INT16_SCALE), -INT16_SCALE, INT16_SCALE - 1)
        stored: NDArray[np.int16] = levels.astype(np.int16)
        occurrences = {
            "mixed": samples.shape[1] > 1,
            "limited": bool(np.abs(mono).max() > 1),
            # what is stored counts: channels may cancel out, and a faint tone is less than a level
            "silent": not stored.any(),
        }
        for change, occurs in occurrences.items():
            if occurs:
                self._changes.add(change, location)
        return stored

    def findings(self) -> Iterator[Finding]:
        """The findings about the recordings converted so far."""
        for rate, tally in sorted(self._rates.items()):
            yield _resampling(tally.count, rate, self.sample_rate, tally.first)
        yield from self._changes.findings("recording", CHANGES)


def counted_changes(counts: Mapping[str, Any], sample_rate: int) -> Iterator[Finding]:
    """The changes by a converter, from the counts in files that earlier versions prepared."""
    for rate, count in counts.get("resampled", {}).items():
        yield _resampling(count, int(rate), sample_rate, "")
    yield from change_findings(counts, counts.get("first_changed", {}), "recording", CHANGES)


def _resampling(count: int, rate: int, new_rate: int, first: str) -> Finding:
    return Finding(count, f"{plural(count, 'recording')} resampled from {rate:,} Hz to {new_rate:,} Hz", first)


def decode_mu_law(codes: NDArray[np.uint8]) -> SampleArray:
    """The samples of 8-bit codes of ITU-T G.711's continuous mu-law: ((256)^|m| - 1) / 255 for m = code / 127.5 - 1."""
    # a table of all codes, since there are only 256
    levels = np.arange(256) / 127.5 - 1
    table = np.sign(levels) * (256.0 ** np.abs(levels) - 1) / 255
    decoded: SampleArray = table.astype(np.float32)[codes]
    return decoded


def read_audio_file(path: Path) -> tuple[SampleArray, int]:
    """The samples (n, channels) of a file and their rate. Raises UserError for a damaged or unknown file."""
    soundfile = import_soundfile()
    # first: soundfile reads what is left of a file that was cut off, and says nothing
    _check_complete(path)
    try:
        with soundfile.SoundFile(path) as file:
            if file.format not in FORMATS:
                raise UserError(f"{path}: this recording is of format {file.format}; {', '.join(FORMATS)} are read")
            if not MIN_RATE <= file.samplerate <= MAX_RATE:
                # a rate without bound is a filter, and a longest recording, without bound
                bounds = f"{MIN_RATE:,} to {MAX_RATE:,} Hz are read"
                raise UserError(f"{path}: the rate of this recording is {file.samplerate:,} Hz; {bounds}")
            # by the header, before memory is taken for the samples
            if file.frames > MAX_SECONDS * file.samplerate:
                raise UserError(f"{path}: this recording takes more than {MAX_SECONDS:,} seconds; split it")
            samples: SampleArray = file.read(dtype="float32", always_2d=True)
            declared = file.frames
            rate = int(file.samplerate)
    except UserError:
        raise
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
    """Raise UserError for a file that is cut off, where soundfile would read what is left without a word."""
    with path.open("rb") as file:
        start = file.read(_MAX_OUTER_HEADER)
        if start.startswith(_OGG_PAGE):
            _check_ogg(file, path)
            return
        declared = _declared_size(start)
        actual = path.stat().st_size
        if declared is not None and declared > actual:
            raise _incomplete(path, declared, actual)
        if start.startswith(b"RIFF"):
            _check_wav(file, path)


def _declared_size(start: bytes) -> int | None:
    """The bytes that a file has according to the header that it starts with, None where it gives none.

    The containers of 32-bit sizes (RIFF of wav, FORM of aiff) and of 64 bits (RF64, W64)."""
    if start.startswith(b"RIFF"):
        size = int.from_bytes(start[4:8], "little")
        if size in _UNKNOWN_SIZES:
            return None
        return size + _RIFF_HEADER
    if start.startswith(b"FORM"):
        return int.from_bytes(start[4:8], "big") + _RIFF_HEADER
    if start.startswith(b"RF64") and start[12:16] == b"ds64":
        return int.from_bytes(start[20:28], "little") + _RIFF_HEADER
    # the identifier of the container has 16 bytes, and the size counts them
    if start.startswith(b"riff"):
        return int.from_bytes(start[16:24], "little")
    return None


def _check_wav(file: BinaryIO, path: Path) -> None:
    """Raise UserError for a wav file that has fewer samples than the header of its samples says."""
    size = path.stat().st_size
    position = _RIFF_HEADER + 4
    # bounded: a damaged file may have chunks without end
    for _ in range(_MAX_CHUNKS):
        file.seek(position)
        chunk = file.read(_RIFF_HEADER)
        if len(chunk) < _RIFF_HEADER:
            return
        position += _RIFF_HEADER
        declared = int.from_bytes(chunk[4:], "little")
        if chunk[:4] == b"data":
            if declared not in _UNKNOWN_SIZES and declared > size - position:
                raise _incomplete(path, position + declared, size)
            return
        # chunks begin at even positions
        position += declared + declared % 2


def _check_ogg(file: BinaryIO, path: Path) -> None:
    """Raise UserError for an ogg file whose last page is incomplete, or not the end of a stream."""
    # the last page is within as many bytes as a page can have
    file.seek(max(0, path.stat().st_size - _MAX_OGG_PAGE))
    tail = file.read(_MAX_OGG_PAGE)
    page = tail[max(0, tail.rfind(_OGG_PAGE)) :]
    # byte 5 has the flags, byte 26 the number of the segments whose lengths follow
    segments = page[27 : 27 + page[26]] if len(page) > 26 else b""
    is_whole = len(page) > 26 and len(segments) == page[26] and len(page) >= 27 + len(segments) + sum(segments)
    if not is_whole or not page[5] & _OGG_END:
        raise UserError(f"{path}: this file is incomplete: its last page is not the end of the recording")


def _incomplete(path: Path, declared: int, actual: int) -> UserError:
    return UserError(
        f"{path}: this file is incomplete: its header gives {declared:,} bytes, but it has {max(0, actual):,}"
    )


def _resample(samples: SampleArray, up: int, down: int) -> SampleArray:
    try:
        from scipy.signal import resample_poly
    except ImportError:
        raise UserError("resampling needs scipy: pip install 'manyformer[audio]'") from None
    resampled: SampleArray = resample_poly(samples, up, down).astype(np.float32)
    return resampled
