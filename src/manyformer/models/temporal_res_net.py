"""A residual network of convolutions along time, over all bands of a frame at once."""

from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from manyformer.models.embedding import EmbeddedSource, SourceEmbedding, positions_of
from manyformer.models.frame_embedding import check_frames, is_frame, move_padding
from manyformer.nn.batches.batch import SegmentLayout
from manyformer.nn.runtime.torch_internals import weight_dtype

FIRST_KERNEL = 3
KERNEL = 9


@final
class TemporalResNet(SourceEmbedding):
    """Residual blocks of two convolutions of 9 frames along time, whose channels are the bands at first.

    Choi et al. 2019 (TC-ResNet), sections 2.2 and 2.3; `widths` are the channels of the first convolution and of each
    block, and a block that widens halves the frames. Global layer norm takes the place of batch norm, which would join
    the rows of a batch. What lies outside of a recording is zero, as padding is."""

    max_length = None

    def __init__(self, mels: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.mels = mels
        self.first = nn.Conv1d(mels, widths[0], FIRST_KERNEL, padding=FIRST_KERNEL // 2, bias=False)
        self.blocks = nn.ModuleList(_TemporalBlock(channels, width) for channels, width in pairwise(widths))

    def read_source(
        self, source: Shaped[Tensor, "b f m"], segments: Int[Tensor, "b s"] | None, layout: SegmentLayout = None
    ) -> EmbeddedSource:
        check_frames(source, self.mels)
        source, segments = move_padding(source.to(weight_dtype(self.first)), segments)
        x = _convolve(self.first, source, segments)
        for block in self.blocks:
            x, segments = block(x, segments)
        positions, _ = positions_of(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device), segments, None)
        return EmbeddedSource(x, positions)

    def extra_repr(self) -> str:
        return f"mels={self.mels}"


class _TemporalBlock(nn.Module):
    """Two convolutions with norms and a shortcut, which is a projection of every second frame where widths differ."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        is_wider = channels != width
        self.stride = 2 if is_wider else 1
        self.conv_in = nn.Conv1d(channels, width, KERNEL, stride=self.stride, padding=KERNEL // 2, bias=False)
        self.conv_out = nn.Conv1d(width, width, KERNEL, padding=KERNEL // 2, bias=False)
        self.norm_in = GlobalLayerNorm(width)
        self.norm_out = GlobalLayerNorm(width)
        self.shortcut = _Shortcut(channels, width) if is_wider else None

    def forward(
        self, x: Float[Tensor, "b f c"], segments: Int[Tensor, "b f"] | None
    ) -> tuple[Float[Tensor, "b g d"], Int[Tensor, "b g"] | None]:
        shortened = None
        if segments is not None:
            shortened = segments[:, :: self.stride]
        # the norm must not count padding, which shrinks with the frames by the same stride
        y = torch.relu(self.norm_in(_convolve(self.conv_in, x, segments), shortened))
        y = self.norm_out(_convolve(self.conv_out, y, shortened), shortened)
        if self.shortcut is None:
            shortcut = x
        else:
            shortcut = self.shortcut(x, shortened)
        return torch.relu(y + shortcut), shortened


class _Shortcut(nn.Module):
    """A projection of every second frame, with a norm."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(channels, width, bias=False)
        self.norm = GlobalLayerNorm(width)

    def forward(self, x: Float[Tensor, "b f c"], segments: Int[Tensor, "b g"] | None) -> Float[Tensor, "b g d"]:
        return torch.relu(self.norm(self.project(x[:, ::2]), segments))


@final
class GlobalLayerNorm(nn.Module):
    """Normalizes each recording over all of its frames and channels, with a gain and a bias of each channel.

    Luo and Mesgarani 2019 (Conv-TasNet), section 2.2: louder frames stay louder, as with batch norm."""

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "b f c"], segments: Int[Tensor, "b f"] | None) -> Float[Tensor, "b f c"]:
        if segments is None:
            valid = x.new_ones(x.shape[:2])
        else:
            valid = is_frame(segments).to(x.dtype)
        valid = valid[..., None]
        count = valid.sum((1, 2), keepdim=True).clamp(min=1) * x.shape[2]
        # padding is zero again after the mean has been subtracted, so that the variance does not count it
        centered = (x - (x * valid).sum((1, 2), keepdim=True) / count) * valid
        variance = centered.square().sum((1, 2), keepdim=True) / count
        return centered * (variance + self.eps).rsqrt() * self.weight + self.bias


def _convolve(
    convolution: nn.Conv1d, x: Float[Tensor, "b f c"], segments: Int[Tensor, "b f"] | None
) -> Float[Tensor, "b g d"]:
    """The convolution along time, for which padding is zero; none of it where there are no rows or frames."""
    if not x.numel():
        # torch refuses to convolve nothing
        return x.new_zeros(x.shape[0], -(-x.shape[1] // convolution.stride[0]), convolution.out_channels)
    if segments is not None:
        x = x * is_frame(segments)[..., None]
    # torch convolves along the last axis, and channels are the last one here
    y: Tensor = convolution(x.mT).mT
    return y
