"""Log-mel features against librosa's."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from manyformer.data.audio.audio_reading import decode_mu_law
from manyformer.data.audio.log_mel import POWER_FLOOR, FrameSettings, log_mel, mel_filters
from real_data import shared_data

pytestmark = pytest.mark.oracle


def difference(wave: NDArray[np.float32], settings: FrameSettings) -> float:
    """The largest difference of any band in any frame."""
    librosa = pytest.importorskip("librosa")
    power = librosa.feature.melspectrogram(
        y=wave,
        sr=settings.sample_rate,
        n_fft=settings.transform,
        hop_length=settings.hop,
        win_length=settings.window,
        n_mels=settings.mels,
    )
    expected = np.log(np.maximum(power, POWER_FLOOR)).T
    features = log_mel(torch.from_numpy(wave)[None], settings, mel_filters(settings).float())[0].numpy()
    assert features.shape == expected.shape
    return float(np.abs(features - expected).max())


@pytest.mark.parametrize(
    ("settings", "samples"),
    [(FrameSettings(16_000, 80, 400, 160), 16_007), (FrameSettings(8000, 40, 200, 80), 4000)],
)
def test_features_are_those_of_librosa(settings: FrameSettings, samples: int) -> None:
    times = np.arange(samples) / settings.sample_rate
    chirp = np.sin(2 * np.pi * (100 + 1500 * times) * times)
    wave = (0.3 * chirp + np.random.default_rng(0).normal(0, 0.02, samples)).astype(np.float32)
    assert difference(wave, settings) < 1e-4


def test_features_of_speech_are_those_of_librosa() -> None:
    archive = np.load(shared_data("spoken_digits", "spoken_digits.npz"))
    starts, codes = np.cumsum(archive["lengths"].astype(np.int64)), archive["samples"]
    for number in range(0, 3000, 500):
        wave = decode_mu_law(codes[starts[number] : starts[number + 1]])
        assert difference(wave, FrameSettings(8000, 40, 200, 80)) < 1e-4
