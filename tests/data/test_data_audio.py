"""Recordings: what batches hold of each kind of source, how they are divided and joined, what is refused and how."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.config import AudioData
from manyformer.data import OpenedData, load_tokenizers, open_data, open_file, open_held_out
from manyformer.data.audio.audio_reading import (
    Recording,
    RecordingConverter,
    counted_changes,
    decode_mu_law,
    read_audio_file,
)
from manyformer.data.audio.log_mel import FrameSettings, LogMelFrontEnd, log_mel, mel_filters
from manyformer.data.audio.utterances import SpecAugment
from manyformer.data.pipeline.kind import OpenRequest, kind_of
from manyformer.data.storage.cache_folder import LOCK_FILE
from manyformer.nn.batches import IGNORE_INDEX, AudioClassificationBatch, TranscriptionBatch

RATE = 8000
Samples = NDArray[np.float32]


def tone(number: int, seconds: float = 0.1, rate: int = RATE) -> Samples:
    """A tone of its own pitch, with a little noise, as every recording here."""
    times = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(number).normal(0, 0.01, len(times))
    wave: Samples = (0.5 * np.sin(2 * np.pi * (300 + 100 * number) * times) + noise).astype(np.float32)
    return wave


def archive(path: Path, count: int = 24, **arrays: Any) -> Path:
    """An archive of tones of 0.1 to 0.14 s labelled 0 and 1, by speakers 0 to 3; `arrays` replace some."""
    waves = [tone(number, 0.1 + 0.01 * (number % 5)) for number in range(count)]
    values: dict[str, Any] = {
        "samples": np.concatenate(waves),
        "lengths": np.array([len(wave) for wave in waves]),
        "label": np.arange(count) % 2,
        "speaker": np.arange(count) // 2 % 4,
        "sample_rate": np.array(RATE),
    }
    np.savez(path, **{name: value for name, value in (values | arrays).items() if value is not None})
    return path


def folder_of_files(root: Path) -> Path:
    """Four recordings of each of two labels, in the formats and sampling rates that are read."""
    for number in range(8):
        file = root / ("left" if number % 2 else "right") / f"{number}.{('wav', 'flac', 'ogg', 'wav')[number // 2]}"
        file.parent.mkdir(parents=True, exist_ok=True)
        rate = 16_000 if number >= 6 else RATE
        wave = tone(number, rate=rate)
        soundfile.write(file, np.stack([wave, wave], 1) if number == 1 else wave, rate)
    return root


def opened(
    path: Path, cache: Path, *, form: str = "labelled", batch: int = 60, seed: int = 0, **more: Any
) -> OpenedData:
    data = AudioData(**{"path": str(path), "sample_rate": RATE, "mels": 8, **more})
    return open_data(data, form, batch_tokens=batch, cache=cache, seed=seed)


def epoch_of(data: OpenedData) -> list[Any]:
    return [next(data.train) for _ in range(data.train.batches)]


def frames_of(batch: AudioClassificationBatch | TranscriptionBatch) -> list[int]:
    rows, length = batch.features.shape[:2]
    return [length] * rows if batch.segments is None else (batch.segments == 0).sum(1).tolist()


def test_batches_have_the_features_of_each_recording(tmp_path: Path) -> None:
    data = opened(archive(tmp_path / "tones.npz"), tmp_path / "cache")
    front_end = data.source
    assert isinstance(front_end, LogMelFrontEnd)
    assert data.labels == ("0", "1")
    assert data.required_keywords == {"mels": 8, "classes": 2}
    rows = []
    for batch in [*epoch_of(data), *data.valid]:
        assert isinstance(batch, AudioClassificationBatch)
        assert batch.features.shape[0] * batch.features.shape[1] <= 60
        for features, label, frames in zip(batch.features, batch.labels, frames_of(batch), strict=True):
            assert not features[frames:].any()
            rows.append((features[:frames], int(label)))
    assert len(rows) == 24
    for number in range(24):
        wave = torch.from_numpy(np.rint(tone(number, 0.1 + 0.01 * (number % 5)) * 32768).astype(np.float32) / 32768)[
            None
        ]
        expected = front_end.features(wave, np.array([wave.shape[1]]))[0]
        same = [row for row in rows if row[0].shape == expected.shape and torch.allclose(row[0], expected, atol=1e-4)]
        assert [label for _, label in same] == [number % 2]


def test_training_frames_have_mean_0_and_deviation_1_in_each_band(tmp_path: Path) -> None:
    batches = epoch_of(opened(archive(tmp_path / "tones.npz"), tmp_path / "cache"))
    rows = [row[:count] for batch in batches for row, count in zip(batch.features, frames_of(batch), strict=True)]
    frames = torch.cat(rows).double()
    torch.testing.assert_close(frames.mean(0), torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-4)
    torch.testing.assert_close(frames.std(0, correction=0), torch.ones(8, dtype=torch.float64), rtol=0, atol=1e-4)


def test_a_folder_has_the_labels_of_its_folders_and_one_rate(tmp_path: Path) -> None:
    data = opened(folder_of_files(tmp_path / "files"), tmp_path / "cache", valid=0.3, batch=20)
    assert data.labels == ("left", "right")
    summary = "\n".join(data.describe())
    assert "2 recordings resampled from 16,000 Hz to 8,000 Hz (first: " in summary
    assert "1 recording with channels averaged (first: " in summary
    batches = [*epoch_of(data), *data.valid]
    assert sum(len(batch.labels) for batch in batches) == 8
    # ogg may end with a few more samples
    assert {count for batch in batches for count in frames_of(batch)} <= {11, 12}


def test_resampled_tones_are_those_of_the_new_rate(tmp_path: Path) -> None:
    numbers = np.arange(12)
    for rate, name in ((RATE, "plain"), (22_050, "other")):
        waves = np.stack([tone(number, 0.4, rate) for number in numbers])
        arrays = {"samples": waves.ravel(), "lengths": [waves.shape[1]] * 12, "label": numbers % 2}
        np.savez(tmp_path / f"{name}.npz", **arrays, speaker=numbers // 6)
    plain, other = (
        opened(
            tmp_path / f"{name}.npz", tmp_path / name, archive_rate=rate, valid_groups=[0], group="speaker", batch=240
        )
        for name, rate in (("plain", RATE), ("other", 22_050))
    )
    middle = [next(iter(data.valid)).features[0, 10:30] for data in (plain, other)]
    assert middle[0].argmax(-1).tolist() == middle[1].argmax(-1).tolist()


@pytest.mark.parametrize("suffix", ["tsv", "csv", "jsonl"])
def test_a_table_names_files_labels_and_groups(tmp_path: Path, suffix: str) -> None:
    folder_of_files(tmp_path / "files")
    files = sorted((tmp_path / "files").rglob("*.*"))
    table = tmp_path / f"table.{suffix}"
    if suffix != "jsonl":
        separator = "\t" if suffix == "tsv" else ","
        mark = "" if suffix == "tsv" else '"'
        names = [f"{mark}{file.relative_to(tmp_path)}{mark}" for file in files]
        cells = [(name, file.parent.name, str(number % 4)) for number, (name, file) in enumerate(zip(names, files))]
        table.write_text("\n".join(map(separator.join, cells)))
        group: int | str = 2
    else:
        line = '{{"path": "{}", "label": "{}", "speaker": {}}}'
        rows = [line.format(file, file.parent.name, number % 4) for number, file in enumerate(files)]
        table.write_text("\n".join(rows))
        group = "speaker"
    data = opened(table, tmp_path / "cache", group=group, valid_groups=[1], test_groups=[2, 3], batch=20)
    assert data.test is not None
    assert [sum(len(b.labels) for b in batches) for batches in (epoch_of(data), data.valid, data.test)] == [2, 2, 4]


def test_an_open_quote_in_a_table_is_named(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text('a.wav,yes\n"b.wav,no\n')
    (tmp_path / "a.wav").touch()
    with pytest.raises(
        UserError, match=r"table.csv:2: this is no record of CSV: the quote that opens in it is not closed"
    ):
        opened(tmp_path / "table.csv", tmp_path / "cache")


def test_a_recording_is_read_for_the_split_of_its_group_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    for number in range(8):
        files.append(tmp_path / "recordings" / f"speaker{number % 4}" / f"label{number // 4}" / f"{number}.wav")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(files[-1], tone(number), RATE)
    read: list[Path] = []

    def read_and_note(path: Path) -> tuple[Samples, int]:
        read.append(path)
        return read_audio_file(path)

    monkeypatch.setattr("manyformer.data.audio.audio_files.read_audio_file", read_and_note)
    settings: dict[str, Any] = {"valid_groups": ["speaker1"], "test_groups": ["speaker2", "speaker3"], "batch": 20}
    opened(tmp_path / "recordings", tmp_path / "cache", group="folder", **settings)
    assert sorted(read) == sorted(files)


def test_groups_are_held_out_whole(tmp_path: Path) -> None:
    path = archive(tmp_path / "tones.npz")
    data = opened(path, tmp_path / "cache", group="speaker", valid_groups=[1], test_groups=[0], batch=20)
    assert data.test is not None
    counts = [sum(len(b.labels) for b in batches) for batches in (epoch_of(data), data.valid, data.test)]
    assert counts == [12, 6, 6]
    with pytest.raises(UserError, match=r"no recording is of group '7' \(data.group\); there are 0, 1, 2, 3"):
        opened(path, tmp_path / "cache2", group="speaker", test_groups=[7])
    with pytest.raises(UserError, match=r"there is no array speakr in it; did you mean speaker"):
        opened(path, tmp_path / "cache3", group="speakr", test_groups=[7])


def test_mu_law_codes_are_expanded() -> None:
    codes = np.arange(256, dtype=np.uint8)
    expected = [np.sign(m) * (256 ** abs(m) - 1) / 255 for m in codes / 127.5 - 1]
    np.testing.assert_allclose(decode_mu_law(codes), expected, atol=1e-7)


def test_integer_samples_are_those_of_floats(tmp_path: Path) -> None:
    waves = np.rint(np.concatenate([tone(number) for number in range(24)]) * 32768) / 32768
    lengths = np.full(24, RATE // 10)
    batches = []
    for name, samples in (("float", waves), ("int", (waves * 32768).astype(np.int16))):
        archive(tmp_path / f"{name}.npz", samples=samples, lengths=lengths)
        batches.append(next(opened(tmp_path / f"{name}.npz", tmp_path / name).train))
    assert torch.equal(batches[0].features, batches[1].features)


def test_transcriptions_have_the_tokens_of_their_texts(tmp_path: Path) -> None:
    path = archive(tmp_path / "tones.npz", text=np.array([f"{'ab' * (number % 3)}c" for number in range(24)]))
    data = opened(path, tmp_path / "cache", form="transcribed")
    assert data.required_keywords == {"mels": 8, "vocab": data.target.vocab}
    assert data.labels is None
    texts = []
    for batch in epoch_of(data):
        assert isinstance(batch, TranscriptionBatch)
        assert batch.target[:, 0].tolist() == [data.target.bos] * len(batch.target)
        lengths = (batch.targets != IGNORE_INDEX).sum(1)
        for target, targets, length in zip(batch.target, batch.targets, lengths.tolist(), strict=True):
            assert targets[length - 1] == data.target.eos
            assert target[1:length].tolist() == targets[: length - 1].tolist()
            texts.append(data.target.decode(targets[: length - 1]))
        if batch.target_segments is not None:
            assert (batch.target_segments == 0).sum(1).tolist() == lengths.tolist()
    assert set(texts) == {"c", "abc", "ababc"}


def test_joined_utterances_have_the_frames_and_texts_of_their_recordings(tmp_path: Path) -> None:
    settings = {
        "form": "transcribed",
        "label": "label",
        "joined": [2, 3],
        "batch": 120,
        "valid": 0.3,
        "names": ["no", "yes"],
    }
    path = archive(tmp_path / "tones.npz")
    data = opened(path, tmp_path / "cache", **settings, silence=[0.05, 0.1])
    first, second = (epoch_of(data) for _ in range(2))
    texts = [data.target.decode(row[row != IGNORE_INDEX]).split() for batch in first for row in batch.targets]
    assert {len(text) for text in texts} <= {2, 3}
    assert {word for text in texts for word in text} == {"yes", "no"}
    for batch in first:
        for frames, row in zip(frames_of(batch), batch.targets, strict=True):
            count = len(data.target.decode(row[row != IGNORE_INDEX]).split())
            assert 10 * count + 5 * (count + 1) <= frames <= 14 * count + 10 * (count + 1) + 1
    again = opened(path, tmp_path / "cache", **settings, silence=[0.05, 0.1])
    assert all(torch.equal(a.features, b.features) for a, b in zip(first, epoch_of(again), strict=True))
    assert [batch.features.shape for batch in first] != [batch.features.shape for batch in second]
    held_out = [[batch.features for batch in data.valid] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*held_out, strict=True))
    with pytest.raises(UserError, match=r"data.joined is for transcription"):
        opened(path, tmp_path / "cache", joined=[1, 2])


def test_masks_are_drawn_in_training_alone_and_resume(tmp_path: Path) -> None:
    path = archive(tmp_path / "tones.npz")
    plain = opened(path, tmp_path / "cache")
    masks = {"frequency_masks": 1, "frequency_mask_width": 4, "time_masks": 1, "time_mask_share": 0.5}
    masked = opened(path, tmp_path / "cache", **masks)
    for batch, expected in zip(masked.valid, plain.valid, strict=True):
        assert torch.equal(batch.features, expected.features)
    first = [next(masked.train) for _ in range(2 * masked.train.batches)]
    epochs = first[: len(first) // 2], first[len(first) // 2 :]
    expected = epoch_of(plain)
    assert any(not torch.equal(a.features, b.features) for a, b in zip(epochs[0], expected, strict=True))
    for batch, unmasked in zip(epochs[0], expected, strict=True):
        kept = batch.features != 0
        assert torch.equal(batch.features[kept], unmasked.features[kept])
    resumed = opened(path, tmp_path / "cache", **masks)
    for _ in range(3):
        next(resumed.train)
    position = resumed.train.state_dict()
    other = opened(path, tmp_path / "cache", **masks)
    other.train.load_state_dict(position)
    assert torch.equal(next(other.train).features, first[3].features)


def test_masks_cover_at_most_their_width_of_each_row() -> None:
    frames = np.array([50, 12, 50])
    masks = SpecAugment(
        frequency_masks=2, frequency_mask_width=3, time_masks=1, time_mask_width=100, time_mask_share=0.25
    )
    counts = []
    for seed in range(40):
        masked = masks.apply(torch.ones(3, 50, 16), frames, np.random.default_rng(seed)) == 0
        bands, covered = masked.all(1), masked.all(2)
        assert int(bands.sum(1).max()) <= 6
        assert covered.sum(1)[1] <= 3
        assert not covered[1, 12:].any()
        counts.append(int(covered.sum(1)[0]))
        # nothing else is masked
        assert torch.equal(masked, bands[:, None] | covered[..., None])
    assert max(counts) == 12
    assert min(counts) == 0


def test_a_mask_of_a_short_row_may_cover_nothing() -> None:
    features = torch.ones(1, 3, 2)
    masks = SpecAugment(time_masks=4, time_mask_share=0.2)
    assert torch.equal(masks.apply(features, np.array([3]), np.random.default_rng(0)), features)


def test_filters_are_triangles_of_equal_area() -> None:
    settings = FrameSettings(16_000, 40, 400, 160)
    filters = mel_filters(settings)
    assert filters.shape == (40, 257)
    areas = filters.sum(1) * 16_000 / 512
    torch.testing.assert_close(areas[20:], torch.ones(20, dtype=torch.float64), rtol=0.02, atol=0)
    with pytest.raises(UserError, match=r"data.mels=400 is too many"):
        mel_filters(settings._replace(mels=400))


def test_features_of_padded_rows_are_those_of_each_alone() -> None:
    settings = FrameSettings(RATE, 8, 200, 80)
    front_end = LogMelFrontEnd(settings, np.zeros(8), np.ones(8))
    waves = torch.randn(2, 900, generator=torch.Generator().manual_seed(0))
    waves[1, 500:] = 0
    together = front_end.features(waves, np.array([900, 500]))
    alone = front_end.features(waves[1:, :500], np.array([500]))
    torch.testing.assert_close(together[1, :7], alone[0])
    assert not together[1, 7:].any()


def test_silence_has_finite_features(tmp_path: Path) -> None:
    filters = mel_filters(FrameSettings(RATE, 8, 200, 80))
    assert log_mel(torch.zeros(1, 400), FrameSettings(RATE, 8, 200, 80), filters).isfinite().all()
    lengths = np.full(24, 800)
    samples = np.concatenate([tone(number) for number in range(24)])
    samples[:800] = 0
    data = opened(archive(tmp_path / "tones.npz", samples=samples, lengths=lengths), tmp_path / "cache")
    assert any("1 recording silent throughout (in 16 bits) (first: " in line for line in data.describe())
    assert all(batch.features.isfinite().all() for batch in [*epoch_of(data), *data.valid])


def test_samples_beyond_the_range_are_limited_and_told(tmp_path: Path) -> None:
    samples = np.concatenate([tone(number) for number in range(24)])
    samples[10] = 2.5
    data = opened(archive(tmp_path / "a.npz", samples=samples, lengths=np.full(24, 800)), tmp_path / "cache")
    assert any("1 recording limited to the range of -1 to 1 (first: " in line for line in data.describe())


def damaged(folder: Path, kind: str) -> str:
    """Damage one of the files; returns the sentence that must name it."""
    file = folder / "right" / "0.wav"
    if kind == "no audio":
        file.write_bytes(b"this is no recording")
        return r"0.wav: this recording cannot be read \("
    if kind == "cut":
        file.write_bytes(file.read_bytes()[:-100])
        return r"0.wav: this file is incomplete: its header gives 1,\d\d\d bytes, but it has 1,\d\d\d"
    if kind == "cut flac":
        flac = folder / "right" / "2.flac"
        flac.write_bytes(flac.read_bytes()[:-300])
        return r"2.flac: this (file is incomplete|recording cannot be read)"
    if kind == "empty":
        soundfile.write(file, np.zeros(0, np.float32), RATE)
        return r"0.wav: this recording has no samples; leave it out"
    if kind == "empty file":
        file.write_bytes(b"")
        return r"0.wav: this recording cannot be read"
    wave = tone(0)
    wave[77] = np.nan
    soundfile.write(file, wave, RATE, subtype="FLOAT")
    return r"0.wav: sample 77 of this recording is not a finite number"


@pytest.mark.parametrize("kind", ["no audio", "cut", "cut flac", "empty", "empty file", "nan"])
def test_a_broken_file_is_named(tmp_path: Path, kind: str) -> None:
    folder = folder_of_files(tmp_path / "files")
    sentence = damaged(folder, kind)
    with pytest.raises(UserError, match=sentence):
        opened(folder, tmp_path / "cache", valid=0.3, batch=20)
    # nothing half prepared is left
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [LOCK_FILE]


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"lengths": np.full(24, 7)}, r"the lengths of its 24 recordings sum to 168, and it has 22,\d\d\d samples"),
        ({"lengths": np.full(24, -1)}, r"lengths must be a whole number, at least 0, for each recording"),
        ({"lengths": None}, r"there is no array lengths in it"),
        ({"samples": np.zeros((24, 3))}, r"samples must be mu-law codes .* float64 of shape \(24, 3\)"),
        ({"label": np.zeros(3, dtype=int)}, r"label must be a whole number or a text for each of 24 recordings"),
        ({"label": np.array([None] * 24)}, r"tones.npz: the array label cannot be read"),
        ({"label": np.zeros(24, dtype=int)}, r"all training recordings have the label '0'"),
        ({"sample_rate": None}, r"it has no array sample_rate; give its rate in Hz as data.archive_rate"),
        ({"sample_rate": np.array(3)}, r"sample_rate must be a whole number of Hz from 1,000 to 768,000"),
    ],
)
def test_a_wrong_archive_is_refused(tmp_path: Path, arrays: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        opened(archive(tmp_path / "tones.npz", **arrays), tmp_path / "cache")


def test_settings_that_contradict_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "tones.npz")
    for settings, sentence in (
        ({"test_groups": [1]}, "are values of data.group, which is missing"),
        ({"group": "speaker"}, "needs values that are held out"),
        ({"group": "speaker", "valid_groups": [1], "valid": 0.1}, "is another way to name valid data"),
        ({"joined": [3, 2]}, "must ascend, and is 3 to 2"),
        ({"silence": [0.3, 0.1]}, "must ascend, and is 0.3 to 0.1"),
        ({"hop": 30.0}, "leaves out samples between frames"),
    ):
        with pytest.raises(ValueError, match=sentence):
            opened(path, tmp_path / "cache", **settings)
    folder = folder_of_files(tmp_path / "files")
    for more, sentence in (
        ({"label": "digit"}, "data.label is a column of a table"),
        (
            {"group": "speaker", "test_groups": [1]},
            "the recordings of a folder have no 'speaker'; data.group is folder",
        ),
    ):
        with pytest.raises(UserError, match=sentence):
            opened(folder, tmp_path / "cache", **more)


def test_long_recordings_are_left_out_of_training_and_told(tmp_path: Path) -> None:
    data = opened(
        archive(tmp_path / "tones.npz"), tmp_path / "cache", max_seconds=0.125, valid_groups=[0], group="speaker"
    )
    assert sum(len(batch.labels) for batch in epoch_of(data)) < 18
    assert "left out at 0.125 seconds (data.max_seconds)" in "\n".join(data.describe())
    with pytest.raises(UserError, match=r"no training recording is as short as data.max_seconds"):
        opened(tmp_path / "tones.npz", tmp_path / "cache", max_seconds=0.01)
    with pytest.raises(UserError, match="the longest training utterance can have 15 frames, more than a batch of 12"):
        opened(tmp_path / "tones.npz", tmp_path / "cache", batch=12)


def test_damaged_and_other_prepared_files_are_prepared_again(tmp_path: Path) -> None:
    path, cache = archive(tmp_path / "tones.npz"), tmp_path / "cache"
    first = epoch_of(opened(path, cache))
    shard = cache / "train.samples.tokens"
    shard.write_bytes(bytes(len(shard.read_bytes())))
    lines: list[str] = []
    data = AudioData(path=str(path), sample_rate=RATE, mels=8)
    again = open_data(data, "labelled", batch_tokens=60, cache=cache, seed=0, log=lines.append)
    assert "train.samples.tokens is damaged" in lines[0]
    assert all(torch.equal(a.features, b.features) for a, b in zip(first, epoch_of(again), strict=True))
    # an interrupted preparation leaves the previous files, and its own are not read
    (cache / "prepared.tmp.part").mkdir()
    assert all(torch.equal(a.features, b.features) for a, b in zip(first, epoch_of(opened(path, cache)), strict=True))


def test_a_front_end_is_restored_and_hostile_ones_are_refused(tmp_path: Path) -> None:
    data = opened(archive(tmp_path / "tones.npz"), tmp_path / "cache")
    assert load_tokenizers(tmp_path / "cache").fingerprint == data.tokenizers.fingerprint
    content = data.source.content()
    for change in ({"mels": 9}, {"deviation": [0.0] * 8}, {"mean": [float("nan")] * 8}, {"hop": 0}, {"window": "200"}):
        with pytest.raises((ValueError, KeyError)):
            LogMelFrontEnd.restore(content | change)
    with pytest.raises(UserError, match="this model reads no text"):
        data.source.encode("text")


def test_held_out_data_and_files_are_scored_with_the_same_features(tmp_path: Path) -> None:
    path = archive(tmp_path / "tones.npz")
    settings: dict[str, Any] = {
        "path": str(path),
        "sample_rate": RATE,
        "mels": 8,
        "group": "speaker",
        "test_groups": [0],
    }
    section = AudioData(**settings)
    data = open_data(section, "labelled", batch_tokens=60, cache=tmp_path / "cache", seed=0)
    request = OpenRequest(60, tmp_path / "cache")
    held_out = open_held_out(section, "labelled", request, None)
    assert held_out.name == "test"
    assert held_out.batches is not None
    assert data.test is not None
    for batch, expected in zip(held_out.batches, data.test, strict=True):
        assert torch.equal(batch[0], expected[0])
    (tmp_path / "scratch").mkdir()
    request = OpenRequest(60, tmp_path / "scratch")
    scored = open_file(section, "labelled", data.tokenizers, str(path), request)
    assert scored.batches is not None
    assert sum(len(batch[1]) for batch in scored.batches) == 24
    other = archive(tmp_path / "other.npz", label=np.arange(24) % 3)
    with pytest.raises(UserError, match="recording 2: the label '2' does not occur in the training data"):
        open_file(section, "labelled", data.tokenizers, str(other), request)


def test_recordings_without_labels_are_read_in_order(tmp_path: Path) -> None:
    data = opened(archive(tmp_path / "tones.npz"), tmp_path / "cache")
    section = AudioData(path="unused", sample_rate=RATE, mels=8, label="label")
    unlabelled = kind_of(section).unlabelled
    assert unlabelled is not None
    soundfile.write(tmp_path / "some.wav", tone(3, rate=16_000), 16_000)
    lines: list[str] = []
    request = OpenRequest(60, tmp_path, log=lines.append)
    inputs = unlabelled(section, data.tokenizers, str(tmp_path / "some.wav"), request)
    batches = list(inputs.batches or ())
    assert [batch.features.shape for batch in batches] == [(1, 11, 8)]
    assert [item.name for item in inputs.inputs] == [str(tmp_path / "some.wav")]
    some = tmp_path / "some.wav"
    assert lines == [f"1 recording resampled from 16,000 Hz to 8,000 Hz (first: {some})"]
    folder = folder_of_files(tmp_path / "files")
    inputs = unlabelled(section, data.tokenizers, str(folder), request)
    assert sum(len(batch.labels) for batch in inputs.batches or ()) == len(list(inputs.inputs)) == 8


def test_texts_of_another_split_fail_the_check_of_the_prepared_files(tmp_path: Path) -> None:
    opened(archive(tmp_path / "tones.npz"), tmp_path / "cache")
    (tmp_path / "cache" / "valid.text.tokens").unlink()
    section = AudioData(path=str(tmp_path / "tones.npz"), sample_rate=RATE, mels=8)
    with pytest.raises(DamagedFile, match=r"valid.text.tokens is missing"):
        open_held_out(section, "labelled", OpenRequest(60, tmp_path / "cache"), "valid")


@pytest.mark.parametrize("name", ["opposite", "faint", "nearly opposite", "zeros"])
def test_a_recording_that_is_stored_as_zeros_is_told(name: str) -> None:
    """Channels may cancel out, and a faint tone may be less than a level of 16 bits."""
    wave = 0.5 * np.sin(np.arange(8000, dtype=np.float32))
    samples = {
        "opposite": np.stack([wave, -wave], 1),
        "faint": wave[:, None] * np.float32(2e-6),
        "nearly opposite": np.stack([wave, np.float32(1e-5) - wave], 1),
        "zeros": np.zeros((8000, 1), np.float32),
    }
    converter = RecordingConverter(RATE)
    assert not converter.convert(Recording(samples[name].astype(np.float32), RATE, None, None, "a.wav")).any()
    message = "1 recording silent throughout (in 16 bits) (first: a.wav)"
    assert message in list(map(str, converter.findings()))


def test_the_overshoot_of_a_resampled_recording_is_told() -> None:
    square = np.sign(np.sin(np.arange(16_000, dtype=np.float32) / 7))[:, None].astype(np.float32)
    converter = RecordingConverter(RATE)
    levels = converter.convert(Recording(square, 16_000, None, None, "square.wav"))
    assert levels.max() == 32767
    assert any("limited to the range" in finding.what for finding in converter.findings())


def test_changes_that_an_earlier_version_counted_are_told() -> None:
    counts = {"resampled": {"16000": 2}, "mixed": 1, "limited": 0, "silent": 3}
    assert list(map(str, counted_changes(counts, RATE))) == [
        "2 recordings resampled from 16,000 Hz to 8,000 Hz",
        "1 recording with channels averaged",
        "3 recordings silent throughout (in 16 bits)",
    ]
