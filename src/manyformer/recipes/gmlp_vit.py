"""gMLP for images: patches mixed by spatial gating units."""

from manyformer.mixers import PairTable, SpatialGate
from manyformer.models import ImageClassifier
from manyformer.models.patch_embedding import count_patches
from manyformer.recipes.gmlp import PAPER, SUMMARY, TinyAttentionDim, position_weight_std, spatial_gate
from manyformer.recipes.keywords import ImageChannels, ImageHeight, ImageWidth, PatchSide
from manyformer.recipes.registry import recipe
from manyformer.recipes.vit import TINY_IMAGES, image_classifier
from manyformer.tasks.media_labels import IMAGE_CLASSIFICATION


@recipe(
    "gMLP for images",
    paper=PAPER,
    summary=SUMMARY,
    task=IMAGE_CLASSIFICATION,
    cost="O(l^2 d + l d^2) per layer, for l = height width / patch^2 patches",
    tiny_keywords={**TINY_IMAGES, "attention_dim": 6},
)
def gmlp_vit(
    classes: int = 1000,
    height: ImageHeight = 224,
    width: ImageWidth = 224,
    channels: ImageChannels = 3,
    patch: PatchSide = 16,
    dim: int = 256,
    depth: int = 30,
    ff_dim: int | None = None,
    attention_dim: TinyAttentionDim = None,
    dropout: float = 0.0,
) -> ImageClassifier:
    """gMLP-S of section 3 by default: no positions, mean pooling, `ff_dim` 6 dim unless given; no feed-forward layers.

    The paper's stochastic depth is left out. `attention_dim` adds the tiny attention of aMLP."""
    shape = (height, width, channels)
    tokens = count_patches(shape, patch)

    def layer(number: int) -> dict[str, SpatialGate]:
        weights = PairTable(tokens, std=position_weight_std(tokens))
        return {"mixer": spatial_gate(dim, ff_dim, weights, attention_dim=attention_dim)}

    return image_classifier(classes, shape, patch, dim, depth, layer, positions="none", pool="mean", dropout=dropout)
