"""A classifier of examples that have an image, sound and a text, or some of them, and the embedding of such parts."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, PatchEmbedding
from manyformer.models.embedding import SourceEmbedding
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.modalities_model import MultimodalClassifier, PartEmbedding
from manyformer.models.tasks.example_parts import MULTIMODAL_CLASSIFICATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.attention.modality_fusion import BottleneckFusion, CrossFusion, Fusion, JointFusion, MemoryIfPresent
from manyformer.nn.core import Chain, Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.positions import SinusoidalPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import branch, check_heads, init_std, scale_residual_init, sinusoidal_embedding
from manyformer.recipes.parts.keywords import FrameHalvings, PatchSide, PositiveSize
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.vit import patch_positions

FusionName = Annotated[
    Literal["joint", "cross", "bottleneck"],
    "attention of all parts to all (joint), of each part to itself and the others in turn (cross), or through a few "
    "tokens alone (bottleneck)",
]

ReadImageHeight = Annotated[PositiveSize | None, "height of images, null for no image; the data decides it in a run"]

ReadImageWidth = Annotated[PositiveSize | None, "width of images, null for no image; the data decides it in a run"]

ReadImageChannels = Annotated[
    PositiveSize | None, "channels of images, null for no image; the data decides it in a run"
]

ReadMelBands = Annotated[
    PositiveSize | None, "mel bands of a frame of sound, null for no sound; the data decides it in a run"
]

TINY_PARTS = {"height": 8, "width": 12, "channels": 2, "patch": 4, "mels": 6}


@recipe(
    "Multimodal Transformer",
    paper="Nagrani et al. 2021, Attention Bottlenecks for Multimodal Fusion, arXiv:2107.00135; cross: Lu et al. 2019, "
    "arXiv:1908.02265",
    summary="Patches, frames and words are one kind of token, and parts exchange information in one of three ways.",
    task=MULTIMODAL_CLASSIFICATION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer for l tokens of all parts; bottleneck: the sum of l^2 of each part",
    reasons={"one_graph": "absent parts decide the shapes"},
    tiny_keywords=TINY_PARTS,
)
def multimodal_transformer(
    classes: int = 10,
    vocab: int | None = None,
    height: ReadImageHeight = 224,
    width: ReadImageWidth = 224,
    channels: ReadImageChannels = 3,
    mels: ReadMelBands = 128,
    patch: PatchSide = 16,
    halvings: FrameHalvings = 2,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    fusion: FusionName = "bottleneck",
    bottleneck_tokens: Annotated[PositiveSize, "number of tokens between parts, where fusion is bottleneck"] = 4,
    fusion_layer: Annotated[
        int | None, "first layer with bottleneck tokens, from 0, where fusion is bottleneck; null means 2/3 of depth"
    ] = None,
    dropout: float = 0.1,
) -> MultimodalClassifier:
    """Pre-norm layers with GELU; sections 3.1 and 3.2, with a mean of tokens in place of a class token of each part.

    A part is an image, sound or a text; a learned vector tells which. An example without a part is classified as if the
    model read the others alone. `cross` is the co-attention of ViLBERT, without its pre-training."""
    check_heads(dim, heads)
    if fusion_layer is not None and fusion != "bottleneck":
        raise UserError(f"fusion_layer ({fusion_layer}) is for fusion=bottleneck, and fusion is {fusion}: leave it out")
    image = (height, width, channels)
    embed = part_embedding(dim, vocab=vocab, image=image, patch=patch, mels=mels, halvings=halvings, dropout=dropout)
    names = list(embed.parts)
    norm = partial(nn.LayerNorm, dim, eps=1e-6)

    def self_attention() -> dict[str, Layer]:
        ff = FeedForward(dim, ff_dim, activation=nn.GELU())
        return {"attention": Attention(dim, heads, SoftmaxKernel()), "ff": ff}

    def cross_attention() -> dict[str, Layer]:
        cross = MemoryIfPresent(Attention(dim, heads, SoftmaxKernel(), source=CrossAttentionSource()))
        return {"cross": cross, "cross_ff": FeedForward(dim, ff_dim, activation=nn.GELU()), **self_attention()}

    def layer_of(make_parts: Callable[[], dict[str, Layer]]) -> Chain:
        add_branch = partial(branch, order="pre", norm=norm, dropout=dropout)
        return Chain(**{name: add_branch(part) for name, part in make_parts().items()})

    fused: Fusion
    if fusion == "joint":
        fused = JointFusion(Chain(**{str(number): layer_of(self_attention) for number in range(depth)}))
    elif fusion == "cross":
        fused = CrossFusion(names, depth, lambda number: layer_of(cross_attention))
    else:
        if fusion_layer is None:
            # fusion from layer 8 of 12 on is the paper's best
            first = 2 * depth // 3
        else:
            first = fusion_layer
        fused = BottleneckFusion(
            names, depth, lambda number: layer_of(self_attention), dim=dim, tokens=bottleneck_tokens, first=first
        )
    scale_residual_init(fused, depth, std=init_std(dim))
    head = ClassHead(dim, classes, transform=norm(), bias=True)
    # all classes start equal, as in the Vision Transformer that the paper begins with
    nn.init.zeros_(head.weight)
    return MultimodalClassifier(embed, fused, head)


def part_embedding(
    dim: int,
    *,
    vocab: int | None,
    image: tuple[int | None, int | None, int | None],
    patch: int,
    mels: int | None,
    halvings: int,
    dropout: float,
) -> PartEmbedding:
    """The embeddings of the parts that are not None; images have learned positions, the others sinusoids."""
    parts: dict[str, SourceEmbedding] = {}
    height, width, channels = image
    # the three sizes of an image come together or not at all
    if None in image and any(image):
        raise UserError(f"an image has a height, a width and channels, and these are {height}, {width} and {channels}")
    if height is not None and width is not None and channels is not None:
        shape = (height, width, channels)
        position = patch_positions("learned", shape, patch, dim, 0)
        parts["image"] = PatchEmbedding(shape, patch, dim, position=position, dropout=dropout)
    if mels is not None:
        sinusoids = SinusoidalPosition(dim)
        # a quarter of the channels, so that convolutions cost less than the layers
        parts["sound"] = FrameEmbedding(
            mels, dim, halvings=halvings, channels=-(-dim // 4), position=sinusoids, dropout=dropout
        )
    if vocab is not None:
        parts["text"] = sinusoidal_embedding(vocab, dim, dropout=dropout)
    return PartEmbedding(dim, parts)
