"""The Speech-Transformer: an encoder of frames of sound, with a decoder that writes what they say, or as classifier."""

from functools import partial
from typing import Annotated

from annotated_types import Ge, Lt
from torch import nn

from manyformer.models import AudioClassifier, ClassHead, EncoderDecoder
from manyformer.models.frame_embedding import FrameEmbedding
from manyformer.models.seq2seq import EncoderCTC
from manyformer.models.tasks.media_labels import AUDIO_CLASSIFICATION
from manyformer.models.tasks.transcription import ATTENTION_TRANSCRIPTION
from manyformer.nn.positions import SinusoidalPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import (
    NormOrder,
    attention_layers,
    check_heads,
    decoder_layers,
    init_std,
    sinusoidal_embedding,
    stack,
)
from manyformer.recipes.parts.keywords import DecoderDepth, FrameChannels, FrameHalvings, MelBands, PositiveSize
from manyformer.recipes.parts.registry import recipe

CTCWeight = Annotated[
    float, Ge(0), Lt(1), "share of CTC of the encoder's output in the loss and in decoding; 0 is the decoder alone"
]


@recipe(
    "Speech-Transformer",
    paper="Dong et al. 2018, Speech-Transformer: A No-Recurrence Sequence-to-Sequence Model for Speech Recognition",
    summary="Frames of sound, shortened by convolutions, are the source of an encoder-decoder that writes letters.",
    task=ATTENTION_TRANSCRIPTION,
    family="softmax",
    cost="O((s + l)^2 d + (s + l) d^2) per layer, for s = frames / 2^halvings",
    tiny_keywords={"mels": 8, "channels": 4, "ctc_weight": 0.3},
)
def speech_transformer(
    vocab: int = 1024,
    mels: MelBands = 80,
    dim: int = 256,
    depth: int = 12,
    decoder_depth: DecoderDepth = 6,
    heads: int = 4,
    ff_dim: int | None = 2048,
    halvings: FrameHalvings = 2,
    channels: FrameChannels = None,
    ctc_weight: CTCWeight = 0.0,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> EncoderDecoder:
    """The big model of section 4.2 by default, without the paper's attention over time and frequency (section 3.3).

    Two convolutions that halve time and frequency, sinusoids on both sides, pre-norm. The target's embedding is also
    the output matrix. With a `ctc_weight` the encoder learns to label the sound, too, by CTC (Watanabe et al. 2017,
    Hybrid CTC/Attention Architecture for End-to-End Speech Recognition), which teaches it sooner where words are;
    `transcribe` and `evaluate` then rank what beam search finds by both, with the same weight (section II-D)."""
    check_heads(dim, heads)
    norm = partial(nn.LayerNorm, dim)
    std = init_std(dim)

    encoder_layer = attention_layers(dim, heads, ff_dim, lambda number: SoftmaxKernel(), make_activation=nn.ReLU)
    decoder_layer = decoder_layers(dim, heads, ff_dim, make_activation=nn.ReLU)
    embed_source = FrameEmbedding(
        mels, dim, halvings=halvings, channels=channels, position=SinusoidalPosition(dim), dropout=dropout
    )
    embed_target = sinusoidal_embedding(vocab, dim, dropout=dropout)
    encoder = stack(depth, encoder_layer, order=norm_order, norm=norm, dropout=dropout, std=std)
    decoder = stack(decoder_depth or depth, decoder_layer, order=norm_order, norm=norm, dropout=dropout, std=std)
    head = ClassHead(dim, vocab, tied=embed_target.token)
    # without a weight there is no second output, so that weights without it still load
    ctc = None
    if ctc_weight:
        ctc = EncoderCTC(dim, vocab, ctc_weight)
    return EncoderDecoder(embed_source, encoder, embed_target, decoder, head, ctc=ctc)


@recipe(
    "Audio Transformer classifier",
    paper="Dong et al. 2018, Speech-Transformer, ICASSP (encoder); Reimers and Gurevych 2019 (mean pooling)",
    summary="Convolutions shorten log-mel frames for a Transformer encoder; its mean output represents a recording.",
    task=AUDIO_CLASSIFICATION,
    family="softmax",
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
    # a token of the encoder covers 2^halvings frames
    embed = FrameEmbedding(
        mels, dim, halvings=halvings, channels=channels, position=SinusoidalPosition(dim), dropout=dropout
    )
    layer = attention_layers(dim, heads, ff_dim, lambda number: SoftmaxKernel())
    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return AudioClassifier(embed, body, ClassHead(dim, classes, bias=True))
