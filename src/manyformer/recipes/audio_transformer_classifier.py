"""The Transformer encoder as a classifier of recordings."""

from functools import partial
from typing import Annotated

from torch import nn

from manyformer.kernels import SoftmaxKernel
from manyformer.models import AudioClassifier, ClassHead
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.position import SinusoidalPosition
from manyformer.recipes.baselines import attention_layers
from manyformer.recipes.keywords import FrameHalvings, MelBands, PositiveSize
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack
from manyformer.tasks.media_labels import AUDIO_CLASSIFICATION


@recipe(
    "Audio Transformer classifier",
    paper="Dong et al. 2018, Speech-Transformer, ICASSP (encoder); Reimers and Gurevych 2019 (mean pooling)",
    summary="Convolutions shorten log-mel frames for a Transformer encoder; its mean output represents a recording.",
    task=AUDIO_CLASSIFICATION,
    cost="O(f^2 d / 16 + f d^2 / 4) per layer for f frames",
    reasons={"one_graph": "lengths of recordings decide the shapes"},
    tiny_keywords={"mels": 6, "channels": 4},
)
def audio_transformer_classifier(
    mels: MelBands = 80,
    classes: int = 10,
    *,
    dim: int = 256,
    depth: int = 6,
    heads: int = 4,
    ff_dim: int | None = None,
    channels: Annotated[PositiveSize, "number of channels of the convolutions that shorten the frames"] = 64,
    halvings: FrameHalvings = 2,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> AudioClassifier:
    """Section 3: two convolutions with stride 2, sinusoids and a standard encoder; `ff_dim` is 4 dim unless given.

    Without the paper's attention over time and frequency. A recording is the mean of its encoded tokens."""
    embed = FrameEmbedding(
        mels, dim, halvings=halvings, channels=channels, position=SinusoidalPosition(dim), dropout=dropout
    )
    layer = attention_layers(dim, heads, ff_dim, lambda number: SoftmaxKernel())
    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return AudioClassifier(embed, body, ClassHead(dim, classes, bias=True))
