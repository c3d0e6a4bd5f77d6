"""gMLP: feed-forward layers with a spatial gating unit, as language model, encoder, and classifier of images."""

from typing import Annotated, Literal

from manyformer.models import ImageClassifier, LanguageModel, MaskedLM, TokenEmbedding
from manyformer.models.image_classifier import count_patches
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.models.tasks.media_labels import IMAGE_CLASSIFICATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.masks import AllKeys, Causal, Mask
from manyformer.nn.positions.position import MaxLengthPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.token_mixing import PairTable, PositionPairs, SpatialGate, ToeplitzPairs
from manyformer.recipes.parts.baselines import LayerMaker, init_std, language_model, masked_lm
from manyformer.recipes.parts.keywords import ImageChannels, ImageHeight, ImageWidth, PatchSide, PositiveSize
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.vit import TINY_IMAGES, image_classifier

PAPER = "Liu et al. 2021, Pay Attention to MLPs, arXiv:2105.08050"

SUMMARY = "One half of a feed-forward layer, mixed along the sequence by fixed weights, gates the other: no attention."

PositionWeightKind = Annotated[
    Literal["table", "shifts"], "one weight for each pair of positions (table), or one for each distance (shifts)"
]

TinyAttentionDim = Annotated[PositiveSize | None, "width of the small attention added to the gate; null means none"]


@recipe(
    "gMLP",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    family="mixing",
    cost="O(l^2 d + l d^2) per layer",
    tiny_keywords={"attention_dim": 6},
)
def gmlp(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 16,
    ff_dim: int | None = None,
    max_length: int = 1024,
    weights: PositionWeightKind = "table",
    attention_dim: TinyAttentionDim = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """A causal gMLP: the matrix over positions is lower triangular; `ff_dim` is 6 dim unless given; pre-norm.

    Section 2; the paper's models are encoders. It has no positions. `weights` are a number for each pair of positions
    or, as for masked tokens in section 4, for each distance. `attention_dim` is the width of the tiny attention of aMLP
    (section 4.3)."""
    embed = _embedding(vocab, dim, max_length, dropout)
    layer = _layers(dim, depth, ff_dim, max_length, weights, attention_dim, Causal())
    return language_model(embed, depth, layer, dropout=dropout)


@recipe(
    "gMLP encoder",
    paper=PAPER,
    summary=SUMMARY,
    task=MASKED_LM,
    family="mixing",
    cost="O(l^2 d + l d^2) per layer",
    tiny_keywords={"attention_dim": 6},
)
def gmlp_encoder(
    vocab: int = 30522,
    dim: int = 512,
    depth: int = 48,
    ff_dim: int | None = None,
    max_length: int = 512,
    weights: PositionWeightKind = "shifts",
    attention_dim: TinyAttentionDim = None,
    dropout: float = 0.0,
) -> MaskedLM:
    """The paper's base model for masked tokens by default, section 4; otherwise as `gmlp`."""
    embed = _embedding(vocab, dim, max_length, dropout)
    layer = _layers(dim, depth, ff_dim, max_length, weights, attention_dim, AllKeys())
    return masked_lm(embed, depth, layer, dropout=dropout)


@recipe(
    "gMLP for images",
    paper=PAPER,
    summary=SUMMARY,
    task=IMAGE_CLASSIFICATION,
    family="mixing",
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
        # images have one size, so a table of all pairs of patches is enough
        weights = PairTable(tokens, std=position_weight_std(tokens))
        return {"mixer": spatial_gate(dim, ff_dim, weights, attention_dim=attention_dim)}

    return image_classifier(classes, shape, patch, dim, depth, layer, positions="none", pool="mean", dropout=dropout)


def spatial_gate(
    dim: int, ff_dim: int | None, weights: PositionPairs, mask: Mask | None = None, attention_dim: int | None = None
) -> SpatialGate:
    """One layer's spatial gating unit with its two projections, and a tiny attention where `attention_dim` is given."""
    ff_dim = 6 * dim if ff_dim is None else ff_dim
    tiny_attention = None
    if attention_dim is not None:
        # one head reads the layer's input and adds to the gate, which has half of the hidden channels
        tiny_attention = Attention(
            dim, 1, SoftmaxKernel(mask), head_dim=attention_dim, value_dim=attention_dim, out_dim=ff_dim // 2
        )
    return SpatialGate(dim, ff_dim, weights, mask=mask, attention=tiny_attention)


def position_weight_std(max_length: int) -> float:
    """The initial deviation of position weights: their sum over all positions is small against the bias of 1."""
    return 1e-3 / max_length


def _embedding(vocab: int, dim: int, max_length: int, dropout: float) -> TokenEmbedding:
    """Token vectors without positions, for at most `max_length` tokens."""
    return TokenEmbedding(vocab, dim, position=MaxLengthPosition(max_length), std=init_std(dim), dropout=dropout)


def _layers(
    dim: int,
    depth: int,
    ff_dim: int | None,
    max_length: int,
    weights: PositionWeightKind,
    attention_dim: int | None,
    mask: Mask,
) -> LayerMaker:
    weight_class = PairTable if weights == "table" else ToeplitzPairs
    # near 0 beside a bias of 1, so that a unit is at first the identity on the gated half (section 2.1)
    layer_weights = [weight_class(max_length, std=position_weight_std(max_length)) for _ in range(depth)]
    return lambda number: {"mixer": spatial_gate(dim, ff_dim, layer_weights[number], mask, attention_dim)}
