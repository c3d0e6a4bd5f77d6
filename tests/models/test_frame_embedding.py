"""The embedding of frames: against torch on each recording alone, and its padding."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.base.errors import UserError
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.nn.positions import LearnedPosition

MELS, DIM = 7, 6


def embedding(halvings: int = 2) -> FrameEmbedding:
    torch.manual_seed(0)
    return FrameEmbedding(MELS, DIM, halvings=halvings, position=LearnedPosition(DIM, 8, std=1.0)).double().eval()


def frames(rows: int, count: int) -> Tensor:
    return torch.randn(rows, count, MELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def brute_force(embed: FrameEmbedding, recording: Tensor) -> Tensor:
    """Convolutions of one recording, whose frames and bands are surrounded by zeros; then projection and position."""
    x = recording[None]
    for convolution in embed.convolutions:
        assert isinstance(convolution, nn.Conv2d)
        padded = F.pad(x, (1, 1, 1, 1))
        length, bands = (-(-size // 2) for size in x.shape[1:])
        y = torch.zeros(convolution.out_channels, length, bands, dtype=x.dtype)
        for frame in range(length):
            for band in range(bands):
                patch = padded[:, 2 * frame : 2 * frame + 3, 2 * band : 2 * band + 3]
                y[:, frame, band] = (convolution.weight * patch).sum((1, 2, 3)) + convolution.bias
        x = y.clamp(min=0)
    rows = [embed.project(x[:, frame].flatten()) for frame in range(x.shape[1])]
    positions = next(iter(embed.position.parameters()))
    return torch.stack([row + positions[number] for number, row in enumerate(rows)])


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("halvings", [0, 1, 2])
def test_each_token_stands_for_its_frames(count: int, halvings: int) -> None:
    embed, recording = embedding(halvings), frames(1, min(count, 8))
    x, positions = embed.read_source(recording, None)
    torch.testing.assert_close(x[0], brute_force(embed, recording[0]))
    assert positions.position_ids[0].tolist() == list(range(x.shape[1]))


@pytest.mark.parametrize("padding", ["right", "left", "middle"])
def test_padding_changes_nothing(padding: str) -> None:
    embed, recordings = embedding(), frames(2, 12)
    columns = {"right": range(9), "left": range(3, 12), "middle": [*range(4), *range(7, 12)]}[padding]
    segments = torch.full((2, 12), -1)
    segments[0], segments[1, list(columns)] = 0, 0
    x, positions = embed.read_source(recordings, segments)
    alone, _ = embed.read_source(recordings[1:, list(columns)], None)
    assert alone.shape[1] == 3
    torch.testing.assert_close(x[1:, :3], alone)
    assert positions.segment_ids.tolist() == [[0, 0, 0], [0, 0, 0]]
    longer = torch.cat([recordings, torch.randn(2, 9, MELS, dtype=torch.float64)], 1)
    x, positions = embed.read_source(longer, torch.cat([segments, torch.full((2, 9), -1)], 1))
    torch.testing.assert_close(x[1:, :3], alone)
    assert positions.segment_ids.tolist() == [[0, 0, 0, -1, -1, -1]] * 2


def test_rows_without_frames_and_no_rows_are_empty() -> None:
    embed = embedding()
    assert embed.read_source(frames(2, 0), None).x.shape == (2, 0, DIM)
    assert embed.read_source(frames(0, 5), None).x.shape == (0, 2, DIM)
    x, positions = embed.read_source(frames(1, 5), torch.full((1, 5), -1))
    assert x.isfinite().all()
    assert positions.segment_ids.tolist() == [[-1, -1]]


def test_positions_limit_the_frames_and_wrong_frames_are_refused() -> None:
    embed = embedding()
    assert embed.max_length == 32
    with pytest.raises(UserError, match=r"built with mels=7, and these are torch.float64 of shape \(1, 4, 6\)"):
        embed.read_source(frames(1, 4)[..., :6], None)
    with pytest.raises(UserError, match=r"and these are torch\.int64"):
        embed.read_source(torch.zeros(1, 4, MELS, dtype=torch.long), None)
    with pytest.raises(UserError, match=r"segments \(1, 3\) must have the shape of the frames \(1, 4\)"):
        embed.read_source(frames(1, 4), torch.zeros(1, 3, dtype=torch.long))


def test_pieces_with_a_state_are_the_whole() -> None:
    embed, recordings = embedding(), frames(2, 32)
    state, pieces = embed.init_state(2, device=recordings.device, dtype=recordings.dtype), list[Tensor]()
    for piece in recordings.split([4, 8, 20], dim=1):
        (x, _), next_state = embed.read_piece(piece, None, state)
        assert next_state is not None
        state = next_state
        pieces.append(x)
    torch.testing.assert_close(torch.cat(pieces, 1), embed.read_source(recordings, None).x)
    with pytest.raises(UserError, match="a piece of 6 frames cannot be continued: 4 frames are a token"):
        embed.read_piece(recordings[:, :6], None, state)


def test_a_piece_after_padding_continues_what_is_before_it() -> None:
    embed, recordings = embedding(), frames(2, 16)
    segments = torch.zeros(2, 8, dtype=torch.long)
    segments[1, 4:] = -1
    start = embed.init_state(2, device=recordings.device, dtype=recordings.dtype)
    _, state = embed.read_piece(recordings[:, :8], segments, start)
    (x, _), _ = embed.read_piece(recordings[:, 8:], None, state)
    continued = torch.cat([recordings[1:, :4], recordings[1:, 8:]], 1)
    torch.testing.assert_close(x[1:], embed.read_source(continued, None).x[:, 1:])
