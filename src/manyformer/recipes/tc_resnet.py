"""TC-ResNet: convolutions along time as a classifier of recordings."""

from manyformer.base.errors import UserError
from manyformer.models import AudioClassifier, ClassHead
from manyformer.models.tasks.media_labels import AUDIO_CLASSIFICATION
from manyformer.models.temporal_res_net import TemporalResNet
from manyformer.nn.core import Chain
from manyformer.nn.runtime.dropout import Dropout
from manyformer.recipes.parts.keywords import MelBands
from manyformer.recipes.parts.registry import recipe

WIDTH_UNITS = (2, 3, 4, 6)
"""The channels of the first convolution and of the three stages in units of a sixth of the last: 16, 24, 32, 48."""


@recipe(
    "TC-ResNet",
    paper="Choi et al. 2019, Temporal Convolution for Real-time Keyword Spotting, arXiv:1904.03814",
    summary="A residual network of convolutions along time, without attention: a control for recordings.",
    task=AUDIO_CLASSIFICATION,
    family="mixing",
    cost="O(f d^2) per block for f frames",
    reasons={"heads": "it has convolutions alone"},
    tiny_keywords={"mels": 6, "dim": 12},
)
def tc_resnet(
    mels: MelBands = 40, classes: int = 12, *, dim: int = 48, depth: int = 1, dropout: float = 0.5
) -> AudioClassifier:
    """TC-ResNet8 by default, TC-ResNet14 with depth=2: three stages of `depth` blocks, `dim` channels in the last.

    Section 2.3. Features are log-mel bands instead of their cosine transform, and global layer norm takes the place of
    batch norm."""
    if dim % WIDTH_UNITS[-1]:
        raise UserError(f"dim ({dim}) must be a multiple of {WIDTH_UNITS[-1]}: the stages have 1/2, 2/3 and all of it")
    first, *stages = (dim * units // WIDTH_UNITS[-1] for units in WIDTH_UNITS)
    # mel bands are the channels of the first convolution, so that every filter sees all frequencies at once
    embed = TemporalResNet(mels, [first, *(width for width in stages for _ in range(depth))])
    return AudioClassifier(embed, Chain(), ClassHead(dim, classes, bias=True, transform=Dropout(dropout)))
