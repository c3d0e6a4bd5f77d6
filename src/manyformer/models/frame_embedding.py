"""Embedding of sound: convolutions that shorten a sequence of frames, then a projection."""

from typing import NamedTuple, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.embedding import EmbeddedSource, SourceEmbedding, StreamTail, empty_tail, positions_of
from manyformer.nn.batches.batch import SegmentLayout
from manyformer.nn.core import PADDING_SEGMENT, TokenPositions
from manyformer.nn.feed_forward.feedforward import init_glorot
from manyformer.nn.positions.position import NoPosition, Position
from manyformer.nn.runtime.dropout import Dropout
from manyformer.nn.runtime.torch_internals import is_plain, weight_dtype


class FrameState(NamedTuple):
    """What the next frames need of those before: the last input of each convolution, and the last position."""

    columns: list[Float[Tensor, "b c n"]]
    tail: StreamTail


@final
class FrameEmbedding(SourceEmbedding):
    """Frames of `mels` bands as tokens, each of which stands for 2^`halvings` frames (Gulati et al. 2020, section 2.1).

    Dong et al. 2018, section 3.2: each convolution has 3 x 3 filters over time and bands with stride 2, and a ReLU; a
    projection of all channels of a frame follows. n frames become n / 2 by each, rounded up: what lies outside of a
    recording is zero, as padding is. Padding may stand anywhere, and is at the end of the embedded source. A token
    sees frames before its own, none after them, so that sound can be read in pieces with a state.

    Raises UserError for frames with another number of bands."""

    def __init__(
        self,
        mels: int,
        dim: int,
        *,
        halvings: int = 2,
        channels: int | None = None,
        position: Position | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.mels = mels
        self.halvings = halvings
        self.position = NoPosition() if position is None else position
        width = dim if channels is None else channels
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width if number else 1, width, 3, stride=2, padding=1) for number in range(halvings)
        )
        # rounded up, as every convolution of stride 2 with padding 1 does
        bands = -(-mels // 2**halvings)
        self.project = nn.Linear(bands * width if halvings else mels, dim)
        init_glorot(self.project)
        self.dropout = Dropout(dropout)

    @property
    def max_length(self) -> int | None:
        """The maximum number of frames; None for no limit."""
        if self.position.max_length is None:
            return None
        # a position is one of a token, and a token stands for so many frames
        return self.position.max_length << self.halvings

    def read_source(
        self, source: Shaped[Tensor, "b f m"], segments: Int[Tensor, "b s"] | None, layout: SegmentLayout = None
    ) -> EmbeddedSource:
        return self.read_piece(source, segments, None)[0]

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> FrameState:
        """The state before any frame: what lies before a recording is zero."""
        columns = list[Tensor]()
        channels = 1
        bands = self.mels
        for convolution in self.convolutions:
            assert isinstance(convolution, nn.Conv2d)
            # each convolution reads one frame before its first own one, because its filters are three frames long
            columns.append(torch.zeros(batch, channels, bands, device=device, dtype=dtype))
            channels = convolution.out_channels
            bands = -(-bands // 2)
        return FrameState(columns, empty_tail(batch, device))

    def read_piece(
        self, source: Shaped[Tensor, "b f m"], segments: Int[Tensor, "b s"] | None, state: FrameState | None
    ) -> tuple[EmbeddedSource, FrameState | None]:
        """Embed the frames that follow those before `state`, and return the next state.

        Raises UserError with a state for frames that fill no whole tokens: the next frames would belong to the last."""
        check_frames(source, self.mels)
        if state is not None and source.shape[1] % 2**self.halvings:
            raise UserError(
                f"a piece of {source.shape[1]} frames cannot be continued: {2**self.halvings} frames are a token, so "
                f"pieces have a multiple of them; zeros may fill the last one"
            )
        source, segments = move_padding(source, segments)
        x = source[:, None].to(weight_dtype(self.project))
        columns = list[Tensor]()
        for number, convolution in enumerate(self.convolutions):
            # the bias of the convolution before has filled padding, and filters of this one reach into it
            x = _without_padding(x, segments)
            last_frame = None if state is None else state.columns[number]
            if last_frame is not None:
                # remembered before the convolution: the next piece begins with the input of this layer, not with its
                # output
                columns.append(_last_frames(x, segments, last_frame))
            if x.numel():
                x = torch.relu(_convolve(x, convolution, last_frame))
            else:
                x = _halved(x, convolution)
            # token n is centered on frame 2 n, and is padding where that frame is
            segments = None if segments is None else segments[:, ::2]
        # (b, channels, tokens, bands) to (b, tokens, channels * bands)
        x = _without_padding(x, segments).transpose(1, 2).flatten(2)
        tokens = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        positions, tail = positions_of(tokens, segments, None if state is None else state.tail)
        embedded = EmbeddedSource(self(x, positions), positions)
        return embedded, None if tail is None else FrameState(columns, tail)

    def forward(self, x: Float[Tensor, "b l n"], positions: TokenPositions) -> Float[Tensor, "b l d"]:
        """The vectors of tokens: a projection of all channels and bands that the convolutions have left of each."""
        dropped: Tensor = self.dropout(self.position.embed(self.project(x), positions))
        return dropped

    def extra_repr(self) -> str:
        return f"mels={self.mels}, {2**self.halvings} frames in a token"


def check_frames(frames: Shaped[Tensor, "b f m"], mels: int) -> None:
    """Raise UserError unless frames are numbers of so many bands."""
    if frames.ndim != 3 or not frames.is_floating_point() or frames.shape[-1] != mels:
        raise UserError(
            f"frames must be floating point numbers (batch, frames, {mels}), as this model was built with mels={mels}, "
            f"and these are {frames.dtype} of shape {tuple(frames.shape)}"
        )


def move_padding(
    frames: Float[Tensor, "b f m"], segments: Int[Tensor, "b s"] | None
) -> tuple[Float[Tensor, "b f m"], Int[Tensor, "b f"] | None]:
    """The frames of each row first, in their order, and padding after them, so that it separates no frames."""
    if segments is None:
        return frames, None
    if segments.shape != frames.shape[:2]:
        raise UserError(f"segments {tuple(segments.shape)} must have the shape of the frames {tuple(frames.shape[:2])}")
    # a stable sort of two kinds keeps the frames in their order
    order = (segments == PADDING_SEGMENT).byte().argsort(dim=1, stable=True)
    return frames.gather(1, order[..., None].expand_as(frames)), segments.gather(1, order)


def is_frame(segments: Int[Tensor, "b f"]) -> Bool[Tensor, "b f"]:
    """Which frames are not padding."""
    return segments != PADDING_SEGMENT


def _without_padding(x: Float[Tensor, "b c f m"], segments: Int[Tensor, "b f"] | None) -> Float[Tensor, "b c f m"]:
    if segments is None:
        return x
    return x * is_frame(segments)[:, None, :, None]


def _halved(x: Float[Tensor, "b c f m"], convolution: nn.Module) -> Float[Tensor, "b k h n"]:
    """What a convolution with stride 2 makes of no rows or no frames, which it refuses."""
    assert isinstance(convolution, nn.Conv2d)
    return x.new_zeros(x.shape[0], convolution.out_channels, -(-x.shape[2] // 2), -(-x.shape[3] // 2))


def _convolve(
    x: Float[Tensor, "b c f m"], convolution: nn.Module, last_frame: Float[Tensor, "b c m"] | None
) -> Float[Tensor, "b k h n"]:
    """The convolution after another frame than zeros; f is even then, so that no filter goes beyond the last frame."""
    if last_frame is None:
        y: Tensor = convolution(x)
        return y
    context = torch.cat([last_frame[:, :, None].to(x), x], 2)
    if is_plain(convolution, nn.Conv2d):
        # no padding along time, where the remembered frame takes its place
        return F.conv2d(context, convolution.weight, convolution.bias, stride=2, padding=(0, 1))
    # a frame more before it makes a first token, which is nobody's
    shifted: Tensor = convolution(F.pad(context, (0, 0, 1, 0)))
    return shifted[:, :, 1:]


def _last_frames(
    x: Float[Tensor, "b c f m"], segments: Int[Tensor, "b f"] | None, last_frame: Float[Tensor, "b c m"]
) -> Float[Tensor, "b c m"]:
    """The last frame of each row that is not padding, `last_frame` where there is none; padding is at the end."""
    context = torch.cat([last_frame[:, :, None].to(x), x], 2)
    if segments is None:
        return context[:, :, -1]
    # the remembered frame has the index 0, so that the number of frames is the index of the last one
    return context[torch.arange(len(x), device=x.device), :, is_frame(segments).sum(1)]
