"""Models of recordings against one recording at a time."""

import pytest
import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.models import AudioClassifier
from manyformer.models.temporal_res_net import GlobalLayerNorm, TemporalResNet
from manyformer.nn.batches import AudioClassificationBatch

MELS = 6
PAPERS_PARAMETERS = 66_000
"""Of TC-ResNet8 with 40 bands and 12 labels (Choi et al. 2019, table 1)."""


def frames(rows: int, count: int) -> Tensor:
    return torch.randn(rows, count, MELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def convolution_of(weight: Tensor, x: Tensor, stride: int = 1) -> Tensor:
    """Every `stride`-th frame as the sum over the taps of a convolution along time; missing frames are zero."""
    reach, rows = weight.shape[2] // 2, []
    for center in range(0, len(x), stride):
        taps = [(tap, center + tap - reach) for tap in range(weight.shape[2])]
        rows.append(sum(weight[:, :, tap] @ x[frame] for tap, frame in taps if 0 <= frame < len(x)))
    return torch.stack([torch.as_tensor(row) for row in rows])


def brute_force(net: TemporalResNet, x: Tensor) -> Tensor:
    """Section 2.2 of the paper for one recording (f, m), with global layer norm."""

    def normalized(y: Tensor, norm: nn.Module) -> Tensor:
        assert isinstance(norm, GlobalLayerNorm)
        return norm.weight * (y - y.mean()) / (y.var(correction=0) + norm.eps).sqrt() + norm.bias

    x = convolution_of(net.first.weight, x)
    for block in net.blocks:
        stride = block.stride
        y = normalized(convolution_of(block.conv_in.weight, x, stride), block.norm_in).relu()
        y = normalized(convolution_of(block.conv_out.weight, y), block.norm_out)
        if stride == 2:
            x = normalized(x[::2] @ block.shortcut.project.weight.T, block.shortcut.norm).relu()
        x = (x + y).relu()
    return x


@pytest.mark.parametrize("count", [1, 2, 7, 16, 21])
def test_convolutions_along_time_are_those_of_each_frame(count: int) -> None:
    torch.manual_seed(0)
    net = TemporalResNet(MELS, [4, 6, 6, 8]).double()
    recording = frames(1, count)
    torch.testing.assert_close(net.read_source(recording, None).x[0], brute_force(net, recording[0]))


@torch.no_grad()
@pytest.mark.parametrize("recipe", ["audio-transformer-classifier", "tc-resnet"])
def test_each_recording_of_a_padded_batch_is_classified_as_alone(recipe: str) -> None:
    torch.manual_seed(0)
    keywords = {"dim": 12, "heads": 2} if recipe != "tc-resnet" else {"dim": 12}
    model = mf.build(recipe, mels=MELS, classes=3, depth=1, **keywords).double().eval()
    assert isinstance(model, AudioClassifier)
    lengths = [19, 4, 12, 1]
    features, segments = frames(4, 19), torch.full((4, 19), -1)
    for row, length in enumerate(lengths):
        segments[row, :length] = 0
    logits = model(features, segments).logits
    score = model.score(AudioClassificationBatch(features, torch.tensor([0, 1, 2, -100]), segments))
    nats = 0.0
    for row, length in enumerate(lengths):
        alone = model(features[row : row + 1, :length]).logits
        torch.testing.assert_close(logits[row : row + 1], alone)
        x, _ = model.embed.read_source(features[row : row + 1, :length], None)
        if recipe == "tc-resnet":
            torch.testing.assert_close(alone, model.head(x.mean(1)))
        nats -= float(alone.log_softmax(-1)[0, row]) if row < 3 else 0.0
    assert int(score.targets) == 3
    assert float(score.nll) == pytest.approx(nats)


def test_tc_resnet_has_the_parameters_of_the_paper_and_whole_widths() -> None:
    model = mf.build("tc-resnet", mels=40, classes=12)
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(PAPERS_PARAMETERS, rel=0.02)
    with pytest.raises(UserError, match=r"dim \(50\) must be a multiple of 6"):
        mf.build("tc-resnet", dim=50)


def test_frames_of_other_bands_are_refused() -> None:
    model = mf.build("tc-resnet", mels=8, classes=2, dim=12)
    with pytest.raises(UserError, match=r"built with mels=8, and these are torch.float32 of shape \(1, 5, 6\)"):
        model(torch.zeros(1, 5, 6))
