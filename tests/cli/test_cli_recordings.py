"""Recordings from the command line: a run that learns tones, its scores, and labels of files."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

import manyformer as mf
from conftest import Cli
from manyformer.train import silent, train


def write_tones(folder: Path) -> None:
    """Forty low and high tones of various lengths, in a folder for each label."""
    random = np.random.default_rng(0)
    for number in range(40):
        pitch = (400, 2000)[number % 2] * random.uniform(0.9, 1.1)
        times = np.arange(int(8000 * random.uniform(0.1, 0.2))) / 8000
        file = folder / ("low", "high")[number % 2] / f"{number}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, 0.3 * np.sin(2 * np.pi * pitch * times) + random.normal(0, 0.01, len(times)), 8000)


def test_a_run_learns_tones_and_labels_files(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tones(tmp_path / "tones")
    data = ["data.path=tones", "data.sample_rate=8000", "data.mels=8", "data.time_masks=1", "data.valid=0.3"]
    sizes = ["dim=8", "depth=1", "heads=2", "channels=4", "batch.tokens=64", "limits.steps=40", "out=runs/tones"]
    train("audio-transformer-classifier", [*data, *sizes, "optim.lr=0.01"], on_event=silent)
    result = cli("evaluate", "runs/tones", "--json")
    assert result.code == 0, result.err
    assert '"accuracy"' in result.out
    for number, pitch in enumerate((410, 1900)):
        tone = 0.3 * np.sin(2 * np.pi * pitch * np.arange(2400) / 16_000)
        soundfile.write(tmp_path / f"{number}.flac", np.stack([tone, tone], 1), 16_000)
    result = cli("predict", "runs/tones", "0.flac")
    assert result.code == 0, result.err
    assert result.out.split("\t")[:2] == ["0.flac", "low"]
    assert "1 recording resampled from 16,000 Hz to 8,000 Hz (first: " in result.err
    assert "1 recording with channels averaged (first: 0.flac)" in result.err
    assert cli("predict", "runs/tones", "1.flac").out.split("\t")[1] == "high"
    model = mf.load("runs/tones")
    assert model.tokenizer is not None
    (tmp_path / "2.wav").write_bytes((tmp_path / "tones" / "low" / "0.wav").read_bytes()[:500])
    result = cli("predict", "runs/tones", "2.wav")
    assert result.code == 2
    assert "2.wav: this file is incomplete" in result.err
    assert "runs/tones on tones" in cli("evaluate", "runs/tones", "--data", "tones").out
