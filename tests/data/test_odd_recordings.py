"""Odd sound files, drawn by a seeded generator: the samples that soundfile reads, or a refusal with the name."""

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.data.audio.audio_reading import Recording, RecordingConverter, decode_mu_law, read_audio_file

Drawer = np.random.Generator
RATE = 16_000


def wave(draw: Drawer) -> NDArray[np.float64]:
    """Noise of one to six channels, sometimes of a single sample."""
    length = int(draw.choice([1, 2, 999, 4000]))
    return draw.uniform(-1, 1, (length, int(draw.integers(1, 7))))


def written(form: str, subtype: str) -> Callable[[Drawer], bytes]:
    def write(draw: Drawer) -> bytes:
        file = io.BytesIO()
        samples = wave(draw)
        if form in ("OGG", "MP3"):
            # codecs of at most two channels, and of some length
            samples = draw.uniform(-1, 1, (9000, int(draw.integers(1, 3))))
        rate = 44_100 if form in ("OGG", "MP3") else int(draw.choice([8000, 11_025, 22_050, 44_100, 96_000]))
        soundfile.write(file, samples, rate, subtype=subtype, format=form)
        return file.getvalue()

    return write


KINDS: dict[str, Callable[[Drawer], bytes]] = {
    **{
        f"{form.lower()}-{subtype.lower()}.wav": written(form, subtype)
        for form in ("WAV", "WAVEX", "RF64", "AIFF", "W64")
        for subtype in ("PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
    },
    "wav-pcm_u8.wav": written("WAV", "PCM_U8"),
    "aiff-pcm_s8.wav": written("AIFF", "PCM_S8"),
    "16.flac": written("FLAC", "PCM_16"),
    "24.flac": written("FLAC", "PCM_24"),
    "8.flac": written("FLAC", "PCM_S8"),
    "vorbis.ogg": written("OGG", "VORBIS"),
    "layer.mp3": written("MP3", "MPEG_LAYER_III"),
    # what it is decides, not how it is called
    "flac-called.wav": written("FLAC", "PCM_16"),
}


@pytest.mark.parametrize("name", KINDS)
def test_samples_are_those_of_soundfile(tmp_path: Path, name: str) -> None:
    for seed in range(3):
        content = KINDS[name](np.random.default_rng([seed, len(name)]))
        (tmp_path / name).write_bytes(content)
        samples, rate = read_audio_file(tmp_path / name)
        expected, expected_rate = soundfile.read(io.BytesIO(content), dtype="float64", always_2d=True)
        assert rate == expected_rate
        assert samples.dtype == np.float32
        # 24 bits and more become 32-bit floating point numbers
        np.testing.assert_allclose(samples, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_stored_levels_are_the_mean_of_the_channels(tmp_path: Path, name: str) -> None:
    content = KINDS[name](np.random.default_rng(11))
    (tmp_path / name).write_bytes(content)
    samples, rate = read_audio_file(tmp_path / name)
    converter = RecordingConverter(rate)
    levels = converter.convert(Recording(samples, rate, None, None, name))
    expected, _ = soundfile.read(io.BytesIO(content), dtype="float64", always_2d=True)
    limited = np.clip(expected.mean(1) * 32768, -32768, 32767)
    # rounded once, in 32 bits
    assert np.abs(levels - limited).max() <= 0.51
    findings = [finding.what for finding in converter.findings()]
    assert ("recording with channels averaged" in findings) == (samples.shape[1] > 1)
    assert ("recording silent throughout (in 16 bits)" in findings) == (not levels.any())


@pytest.mark.parametrize("name", KINDS)
def test_a_recording_that_is_cut_off_is_refused(tmp_path: Path, name: str) -> None:
    draw = np.random.default_rng(5)
    content = KINDS[name](draw)
    while len(content) < 4000:
        content = KINDS[name](draw)
    for share in (0.0, 0.2, 0.5, 0.8, 0.97):
        (tmp_path / name).write_bytes(content[: int(share * len(content))])
        with pytest.raises(UserError, match=f"{name}: this (file is incomplete|recording cannot be read)"):
            read_audio_file(tmp_path / name)


def wav(data: bytes, *, data_size: int | None = None, riff_size: int | None = None, extra: bytes = b"") -> bytes:
    """A WAV file of 16-bit samples at 8,000 Hz, whose headers may lie."""
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 8000, 16_000, 2, 16) + extra
    body = b"WAVE" + head + struct.pack("<4sI", b"data", len(data) if data_size is None else data_size) + data
    return b"RIFF" + struct.pack("<I", len(body) if riff_size is None else riff_size) + body


SAMPLES = np.arange(-500, 500, dtype="<i2")


@pytest.mark.parametrize(
    "content",
    [
        wav(SAMPLES.tobytes(), extra=struct.pack("<4sI", b"note", 5) + b"hello\0"),
        # what programs write that do not know the length yet
        wav(SAMPLES.tobytes(), data_size=0xFFFFFFFF, riff_size=0xFFFFFFFF),
    ],
)
def test_headers_of_other_programs_are_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    samples, rate = read_audio_file(tmp_path / "a.wav")
    assert rate == 8000
    assert (samples[:, 0] * 32768).tolist() == SAMPLES.tolist()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (wav(SAMPLES.tobytes(), data_size=4000), "its header gives 4,044 bytes, but it has 2,044"),
        (wav(SAMPLES.tobytes(), riff_size=9000), "its header gives 9,008 bytes, but it has 2,044"),
    ],
)
def test_a_header_that_promises_more_is_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.wav").write_bytes(content)
    with pytest.raises(UserError, match=rf"a\.wav: this file is incomplete: {problem}"):
        read_audio_file(tmp_path / "a.wav")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_samples_that_are_no_numbers_are_refused_by_place(tmp_path: Path, value: float) -> None:
    samples = np.zeros((100, 2), dtype=np.float32)
    samples[60, 1] = value
    soundfile.write(tmp_path / "a.wav", samples, RATE, subtype="FLOAT")
    with pytest.raises(UserError, match=r"a\.wav: sample 60 of this recording is not a finite number"):
        RecordingConverter(RATE).convert(
            Recording(*read_audio_file(tmp_path / "a.wav"), None, None, str(tmp_path / "a.wav"))
        )


def test_a_format_of_which_a_loss_is_not_noticed_is_refused(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "a.wav", SAMPLES, RATE, format="AU", subtype="PCM_16")
    with pytest.raises(UserError, match=r"a\.wav: this recording is of format AU; WAV, WAVEX"):
        read_audio_file(tmp_path / "a.wav")


@pytest.mark.parametrize("is_lie", [False, True])
def test_a_recording_without_samples_is_refused(tmp_path: Path, is_lie: bool) -> None:
    """Also where the header gives no samples and some follow."""
    (tmp_path / "a.wav").write_bytes(wav(SAMPLES.tobytes() if is_lie else b"", data_size=0))
    with pytest.raises(UserError, match=r"a\.wav: this recording has no samples"):
        RecordingConverter(RATE).convert(
            Recording(*read_audio_file(tmp_path / "a.wav"), None, None, str(tmp_path / "a.wav"))
        )


def test_mu_law_codes_are_near_those_of_g_711(tmp_path: Path) -> None:
    """The continuous law of archives, and the segments of G.711 in files, differ by less than a step."""
    values: Any = decode_mu_law(np.arange(256, dtype=np.uint8))
    assert values[0] == -1
    assert values[255] == 1
    assert (np.diff(values) > 0).all()
    soundfile.write(tmp_path / "a.wav", values, RATE, subtype="ULAW")
    samples, _ = read_audio_file(tmp_path / "a.wav")
    assert np.abs(samples[:, 0] - values).max() < 0.04


@pytest.mark.parametrize("rate", [1, 999, 768_001, 2**31 - 1])
def test_a_wav_file_of_an_impossible_rate_is_refused_by_name_instead_of_asking_for_gigabytes(
    tmp_path: Path, rate: int
) -> None:
    path = tmp_path / "odd.wav"
    soundfile.write(path, np.zeros(100), RATE)
    content = path.read_bytes()
    path.write_bytes(content[:24] + struct.pack("<I", rate) + content[28:])
    with pytest.raises(UserError) as refused:
        read_audio_file(path)
    assert str(refused.value) == f"{path}: the rate of this recording is {rate:,} Hz; 1,000 to 768,000 Hz are read"
