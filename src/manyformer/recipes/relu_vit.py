"""The Vision Transformer with ReLU over the number of patches in place of softmax."""

from manyformer.models import ImageClassifier
from manyformer.models.tasks.media_labels import IMAGE_CLASSIFICATION
from manyformer.nn.kernels.pairwise_kernel import PairwiseKernel, ReluMeanWeights
from manyformer.recipes.parts.baselines import attention_layers
from manyformer.recipes.parts.keywords import ImageChannels, ImageHeight, ImageWidth, PatchSide
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.vit import TINY_IMAGES, ImagePooling, PatchPositionKind, image_classifier


@recipe(
    "ReLU attention",
    paper="Wortsman et al. 2023, Replacing softmax with ReLU in Vision Transformers, arXiv:2309.08586",
    summary="Weights are rectified scores divided by the number of keys: they compete for nothing and need no sum.",
    task=IMAGE_CLASSIFICATION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer, for l = height width / patch^2 patches",
    reasons={
        "attention_dropout": "weights are rectified scores, not those of softmax",
        "convex_weights": "rectified scores may all be zero, and others add up to anything",
    },
    tiny_keywords=TINY_IMAGES,
)
def relu_vit(
    classes: int = 1000,
    height: ImageHeight = 224,
    width: ImageWidth = 224,
    channels: ImageChannels = 3,
    patch: PatchSide = 16,
    dim: int = 384,
    depth: int = 12,
    heads: int = 6,
    ff_dim: int | None = None,
    positions: PatchPositionKind = "learned",
    pool: ImagePooling = "mean",
    dropout: float = 0.0,
) -> ImageClassifier:
    """`vit` of the size S/16 with relu(q.k / sqrt(e)) / l as weights, section 3; queries and keys have no norm.

    `compose` has the same kernel for language models, "relu-mean", where l is the number of visible keys."""
    # divided by the number of keys, which keeps outputs at the scale of softmax at any resolution
    layer = attention_layers(dim, heads, ff_dim, lambda number: PairwiseKernel(weights=ReluMeanWeights()))
    shape = (height, width, channels)
    return image_classifier(classes, shape, patch, dim, depth, layer, positions=positions, pool=pool, dropout=dropout)
