"""The Conformer: attention and convolution in turn, between two half steps of feed-forward layers."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.models import ClassHead, SpeechRecognizer
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.tasks.transcription import TRANSCRIPTION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.convolution.convolution_module import ConvolutionModule, ConvolutionNorm
from manyformer.nn.core import Chain, Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import Mask, Window
from manyformer.nn.positions import NoPosition, Position, TransformerXLPosition
from manyformer.nn.residual import AddJoin, Residual
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import check_heads
from manyformer.recipes.parts.keywords import CausalWindowSize, FrameChannels, FrameHalvings, MelBands, PositiveSize
from manyformer.recipes.parts.registry import recipe

PAPER = "Gulati et al. 2020, Conformer: Convolution-augmented Transformer for Speech Recognition, arXiv:2005.08100"
COST = "O(l^2 d + l d^2) per layer, for l = frames / 2^halvings"

ConvolutionSize = Annotated[PositiveSize, "number of positions that a depthwise convolution sees"]
ConvolutionNormName = Annotated[
    ConvolutionNorm,
    "norm in the convolution module: over all tokens of a training batch but padding (batch), or over each (layer)",
]
DistanceKind = Annotated[Literal["xl", "none"], "scores by distance as in Transformer-XL (xl), or no positions"]

TINY_SPEECH = {"mels": 8, "channels": 4, "kernel_size": 5}


@recipe(
    "Conformer",
    paper=PAPER,
    summary="Attention for the whole of a recording and convolution for neighbours, in every layer; text by CTC.",
    task=TRANSCRIPTION,
    family="softmax",
    cost=COST,
    reasons={
        "causal": "every frame attends to both sides",
        "incremental_decoding": "a later frame changes all earlier outputs, so no state can be cached",
    },
    tiny_keywords=TINY_SPEECH,
)
def conformer(
    vocab: int = 1024,
    mels: MelBands = 80,
    dim: int = 256,
    depth: int = 16,
    heads: int = 4,
    ff_dim: int | None = None,
    kernel_size: ConvolutionSize = 31,
    halvings: FrameHalvings = 2,
    channels: FrameChannels = None,
    positions: DistanceKind = "xl",
    convolution_norm: ConvolutionNormName = "batch",
    dropout: float = 0.1,
) -> SpeechRecognizer:
    """Conformer (M) by default: section 2, with CTC in place of the paper's transducer; `ff_dim` is 4 dim unless given.

    Convolutions have 31 positions, which are centred on a token; the paper's 32 cannot be. Batch norm takes means over
    all tokens of a batch that are not padding, which makes its rows depend on each other while training. Dropout acts
    on tokens and on the output of each branch, not inside feed-forward layers."""
    make_layer = conformer_layer(
        dim, heads, ff_dim, kernel_size, positions=positions, norm=convolution_norm, dropout=dropout
    )
    return _recognizer(vocab, mels, dim, depth, halvings, channels, make_layer, dropout)


@recipe(
    "Conformer, streaming",
    paper=PAPER,
    summary="A Conformer that hears no later frame: a window of attention and causal convolutions, with a small state.",
    task=TRANSCRIPTION,
    family="sparse",
    constant_state=True,
    cost="O(l w d + l d^2) per layer, w tokens in the window",
    tiny_keywords={**TINY_SPEECH, "window": 512},
)
def streaming_conformer(
    vocab: int = 1024,
    mels: MelBands = 80,
    dim: int = 256,
    depth: int = 16,
    heads: int = 4,
    ff_dim: int | None = None,
    window: CausalWindowSize = 128,
    kernel_size: ConvolutionSize = 31,
    halvings: FrameHalvings = 2,
    channels: FrameChannels = None,
    positions: DistanceKind = "xl",
    convolution_norm: ConvolutionNormName = "layer",
    dropout: float = 0.1,
) -> SpeechRecognizer:
    """`conformer` for sound that arrives piece by piece: a state of constant size is carried from piece to piece.

    A token sees itself and those before it, `window` of them in each attention and `kernel_size` in each convolution.
    Layer norm in the convolutions, because the means of batch norm would let the future into the past of training."""
    make_layer = conformer_layer(
        dim,
        heads,
        ff_dim,
        kernel_size,
        mask=Window(window),
        positions=positions,
        norm=convolution_norm,
        dropout=dropout,
    )
    return _recognizer(vocab, mels, dim, depth, halvings, channels, make_layer, dropout)


def conformer_layer(
    dim: int,
    heads: int,
    ff_dim: int | None,
    kernel_size: int,
    *,
    mask: Mask | None = None,
    positions: DistanceKind = "xl",
    norm: ConvolutionNorm = "batch",
    dropout: float = 0.0,
) -> Callable[[], Layer]:
    """A function that makes Conformer layers: half a feed-forward step, attention, convolution, another half, a norm.

    Equations 1 of section 2.4. Under a causal `mask` the convolutions are causal."""
    check_heads(dim, heads)
    causal = mask is not None and mask.causal

    def layer() -> Layer:
        if positions == "xl":
            position: Position = TransformerXLPosition(dim, heads)
        else:
            position = NoPosition()
        branch = partial(_branch, dim, dropout)
        return Chain(
            # two feed-forward layers of half a step each, around the others, as in Macaron-Net (section 2.4)
            first_ff=branch(FeedForward(dim, ff_dim, activation=nn.SiLU()), scale=0.5),
            attention=branch(Attention(dim, heads, SoftmaxKernel(mask), position=position)),
            convolution=branch(ConvolutionModule(dim, kernel_size, causal=causal, norm=norm)),
            # the norm that ends each layer: the stack needs none of its own
            second_ff=branch(FeedForward(dim, ff_dim, activation=nn.SiLU()), scale=0.5, post_norm=nn.LayerNorm(dim)),
        )

    return layer


def _branch(
    dim: int, dropout: float, inner: Layer, *, scale: float = 1.0, post_norm: nn.Module | None = None
) -> Residual:
    # x + scale f(norm(x)): the half steps of feed-forward layers are this scale
    join = AddJoin(dropout=dropout, scale=scale)
    return Residual(inner, pre_norm=nn.LayerNorm(dim), post_norm=post_norm, join=join)


def _recognizer(
    vocab: int,
    mels: int,
    dim: int,
    depth: int,
    halvings: int,
    channels: int | None,
    make_layer: Callable[[], Layer],
    dropout: float,
) -> SpeechRecognizer:
    embed = FrameEmbedding(mels, dim, halvings=halvings, channels=channels, dropout=dropout)
    body = Chain(**{str(number): make_layer() for number in range(depth)})
    return SpeechRecognizer(embed, body, ClassHead(dim, vocab, bias=True))
