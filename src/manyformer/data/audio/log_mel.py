"""Log-mel features of recordings: short-time Fourier transform, mel filters, logarithm, and normalization."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn, final

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import FloatArray, IntArray
from manyformer.data.tokenizers.tokenizer import NativeTokenizer

POWER_FLOOR = 1e-10
"""The least power of a band: silence has a logarithm, too."""
MIN_DEVIATION = 1e-3
"""The least standard deviation of a band: one may be constant in all training data."""

# the scale of Slaney's Auditory Toolbox: linear up to 1,000 Hz, logarithmic above
_LINEAR_HZ = 200 / 3
_LINEAR_LIMIT = 1000.0
_LOG_STEP = math.log(6.4) / 27


@final
class FrameSettings(NamedTuple):
    """How recordings become frames: samples per second, mel bands, samples of a window, samples to the next one."""

    sample_rate: int
    mels: int
    window: int
    hop: int

    @classmethod
    def of_milliseconds(cls, sample_rate: int, mels: int, window: float, hop: float) -> "FrameSettings":
        """Settings with the lengths of window and hop in milliseconds. Raises UserError if a hop has no sample."""
        # milliseconds keep their meaning at every rate
        samples = (round(sample_rate * duration / 1000) for duration in (window, hop))
        settings = cls(sample_rate, mels, *samples)
        if not settings.hop:
            raise UserError(f"data.hop={hop:g} is less than one sample at {sample_rate:,} Hz; set it higher")
        return settings

    @property
    def transform(self) -> int:
        """The length of the Fourier transform: the least power of 2 that holds a window."""
        return 1 << (self.window - 1).bit_length()

    def frame_counts(self, samples: IntArray) -> IntArray:
        """The frames of recordings with so many samples; the first is centered at the first sample."""
        # as `torch.stft` with centered windows counts
        return 1 + samples // self.hop


def mel_filters(settings: FrameSettings) -> Float[Tensor, "m k"]:
    """Triangular filters on Slaney's mel scale, each of area 1, over the frequencies of the Fourier transform.

    Slaney 1998, Auditory Toolbox, as in librosa's default. Raises UserError if a band lies between two frequencies."""
    highest = _hertz_to_mel(settings.sample_rate / 2)
    edges = _mel_to_hertz(np.linspace(0, highest, settings.mels + 2))
    frequencies = np.linspace(0, settings.sample_rate / 2, settings.transform // 2 + 1)
    rising = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    # such a band would be silent in every recording, and its deviation 0
    if not triangles.any(1).all():
        raise UserError(
            f"data.mels={settings.mels} is too many: a band lies between two frequencies of windows of "
            f"{settings.window} samples at {settings.sample_rate:,} Hz; set data.mels lower or data.window higher"
        )
    # of area 1, so that a wide band of high frequencies is not louder than a narrow one
    return torch.from_numpy(triangles * 2 / (edges[2:] - edges[:-2])[:, None])


def log_mel(
    waves: Float[Tensor, "b n"], settings: FrameSettings, filters: Float[Tensor, "m k"]
) -> Float[Tensor, "b f m"]:
    """The natural logarithm of the power in each band, of Hann windows centered at multiples of the hop.

    A recording is surrounded by zeros, so what follows its end may be padding."""
    window = torch.hann_window(settings.window, dtype=waves.dtype)
    spectrum = torch.stft(
        waves,
        settings.transform,
        settings.hop,
        settings.window,
        window,
        pad_mode="constant",
        return_complex=True,
    )
    real, imaginary = torch.view_as_real(spectrum).unbind(-1)
    power = torch.addcmul(real.square(), imaginary, imaginary)
    # in place: features of long recordings are the largest arrays of a batch
    return (filters.to(waves.dtype) @ power).clamp_(min=POWER_FLOOR).log_().mT


@final
class LogMelFrontEnd(NativeTokenizer):
    """Computes normalized log-mel features: the mean and the deviation of each band are those of the training frames.

    It stands where models of text have a tokenizer, and is saved with a model as one. It raises UserError for text."""

    kind = "log-mel"

    def __init__(self, settings: FrameSettings, mean: FloatArray, deviation: FloatArray) -> None:
        self.settings = settings
        self.mean = mean
        self.deviation = deviation
        self._filters = mel_filters(settings).float()
        self._shift, self._scale = (torch.from_numpy(array).float() for array in (mean, 1 / deviation))

    def features(self, waves: Float[Tensor, "b n"], lengths: IntArray) -> Float[Tensor, "b f m"]:
        """The features of padded recordings of so many samples each; padding frames are 0, which is the mean."""
        features = log_mel(waves, self.settings, self._filters).sub_(self._shift).mul_(self._scale)
        frames = torch.from_numpy(self.settings.frame_counts(lengths))
        # normalized silence is not 0: padding must not look like a quiet recording
        is_padding = torch.arange(features.shape[1]) >= frames[:, None]
        return features.masked_fill_(is_padding[..., None], 0.0)

    @property
    def vocab(self) -> int:
        return 0

    def encode_array(self, text: str) -> NoReturn:
        raise UserError("this model reads no text: it was trained on recordings")

    def token_bytes(self, token: int) -> NoReturn:
        raise UserError("the input of this model is no text: it was trained on recordings")

    def content(self) -> dict[str, Any]:
        return {**self.settings._asdict(), "mean": self.mean.tolist(), "deviation": self.deviation.tolist()}

    @classmethod
    def restore(cls, content: dict[str, Any]) -> "LogMelFrontEnd":
        settings = FrameSettings(*(content[name] for name in FrameSettings._fields))
        mean, deviation = (np.array(content[name], dtype=np.float64) for name in ("mean", "deviation"))
        # a damaged file must not ask for a window of gigabytes
        if any(type(value) is not int or not 0 < value < 1 << 20 for value in settings):
            raise ValueError(f"its frames are {settings}")
        if not mean.shape == deviation.shape == (settings.mels,) or not (deviation >= MIN_DEVIATION).all():
            raise ValueError("it has no mean and deviation of each band")
        if not np.isfinite(mean).all() or not np.isfinite(deviation).all():
            raise ValueError("its means and deviations are no finite numbers")
        return cls(settings, mean, deviation)

    @classmethod
    def learn(cls, texts: Iterable[str], size: int | None) -> NoReturn:
        raise UserError("the tokenizer 'log-mel' is for recordings; use char, byte, word or bpe for text")


class FrameStatistics:
    """The mean and the standard deviation of each band over recordings, one added after another."""

    def __init__(self, settings: FrameSettings) -> None:
        self._settings = settings
        self._filters = mel_filters(settings).float()
        self._frames = 0
        self._sum = np.zeros(settings.mels)
        self._squares = np.zeros(settings.mels)

    def add(self, samples: NDArray[np.float32]) -> None:
        """Add all frames of a recording."""
        frames = log_mel(torch.from_numpy(samples)[None], self._settings, self._filters)[0].double().numpy()
        self._frames += len(frames)
        self._sum += frames.sum(0)
        # sums in 64 bits: recordings are added one by one, and none is kept
        self._squares += np.square(frames).sum(0)

    def front_end(self) -> LogMelFrontEnd:
        """The front end that normalizes by these statistics."""
        mean = self._sum / max(1, self._frames)
        # rounding may make a variance negative where a band is constant
        variance = self._squares / max(1, self._frames) - np.square(mean)
        return LogMelFrontEnd(self._settings, mean, np.sqrt(np.maximum(variance, MIN_DEVIATION**2)))


def _hertz_to_mel(hertz: float) -> float:
    linear = hertz / _LINEAR_HZ
    if hertz < _LINEAR_LIMIT:
        return linear
    return _LINEAR_LIMIT / _LINEAR_HZ + math.log(hertz / _LINEAR_LIMIT) / _LOG_STEP


def _mel_to_hertz(mels: FloatArray) -> FloatArray:
    linear = _LINEAR_HZ * mels
    limit = _LINEAR_LIMIT / _LINEAR_HZ
    hertz: FloatArray = np.where(mels < limit, linear, _LINEAR_LIMIT * np.exp(_LOG_STEP * (mels - limit)))
    return hertz
