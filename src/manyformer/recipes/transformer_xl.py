"""Transformer-XL: a language model whose layers cache the states of previous segments."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, NamedTuple

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache import KVSource, SegmentMemorySource
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.masks import Causal, Window
from manyformer.nn.positions import Position, TransformerXLBiases, TransformerXLPosition
from manyformer.nn.residual import AddJoin, Residual
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.bert import ENCODER_ACTIVATIONS, EncoderActivation
from manyformer.recipes.parts.baselines import NormOrder, check_heads, init_std, stack
from manyformer.recipes.parts.keywords import ClampLength, MemoryContext, MemoryLengthOrNone, NormEps
from manyformer.recipes.parts.registry import recipe

BiasSharing = Annotated[
    Literal["all-layers", "per-layer"], "one pair of content and position biases for all layers, or one for each layer"
]


class XLDetails(NamedTuple):
    """What XLNet in one direction has otherwise than Transformer-XL: norms, activation, embedding and output bias."""

    norm_eps: float = 1e-5
    make_activation: Callable[[], nn.Module] = nn.ReLU
    scaled_embedding: bool = True
    head_bias: bool = False


PUBLISHED_DETAILS = XLDetails()
"""Those of Transformer-XL."""

XLAttentionMaker = Callable[[Kernel, KVSource | None], Attention]
"""Makes the attention of a layer, given its kernel and source."""


@recipe(
    "Transformer-XL",
    paper="Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length Context, arXiv:1901.02860",
    summary="Every layer also attends to its cached inputs of previous segments, with relative positions.",
    task=LANGUAGE_MODELLING,
    family="memory",
    constant_state=True,
    cost="O(l (l + m) d + l d^2) per layer, m tokens of memory",
    # decoding step by step equals one pass as long as the memory holds all tokens
    tiny_keywords={"memory_length": 512},
)
def transformer_xl(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    memory_length: MemoryLengthOrNone = 512,
    context: MemoryContext = "growing",
    clamp_length: ClampLength = None,
    bias_sharing: BiasSharing = "all-layers",
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
    norm_eps: NormEps = 1e-5,
    ff_activation: EncoderActivation = "relu",
    *,
    scaled_embedding: Annotated[bool, "embeddings are multiplied by sqrt(dim)"] = True,
    head_bias: Annotated[bool, "the output has a bias for each token (XLNet)"] = False,
) -> LanguageModel:
    """The 12-layer model for enwik8 by default; `ff_dim` is 4 dim unless given; needs data with `packing: contiguous`.

    Memory and segment may have other lengths in evaluation than in training: `memory_length`, `context` and
    `clamp_length` (for much longer memories, 820 in the paper's code) change no weights. With `context="same-length"`
    the loss does not depend on how a text is divided into segments. Dropout applies to branch outputs, embeddings and
    the sinusoids of distances; in the paper's code also inside the feed-forward layers and before the output. Matrices
    are initialized from N(0, 0.4 / dim) where it has a deviation of 0.02. With other norm orders than the paper's, the
    memory holds the unnormalized stream, which is normalized when it is used."""
    if context == "same-length" and memory_length is None:
        raise UserError("context 'same-length' is memory_length tokens; set memory_length, or context to growing")
    mask = Causal() if context == "growing" or memory_length is None else Window(memory_length)

    def attention(number: int, make_attention: XLAttentionMaker) -> Layer:
        # without a memory each row is a text of its own
        source = None
        if memory_length is not None:
            source = SegmentMemorySource(memory_length, dim)
        return make_attention(SoftmaxKernel(mask), source)

    positions = xl_positions(dim, heads, clamp_length, bias_sharing, dropout)
    details = XLDetails(norm_eps, ENCODER_ACTIVATIONS[ff_activation], scaled_embedding, head_bias)
    return xl_model(vocab, dim, depth, heads, ff_dim, attention, positions, dropout, norm_order, details)


def xl_positions(
    dim: int, heads: int, clamp_length: int | None, bias_sharing: BiasSharing, dropout: float
) -> Callable[[], Position]:
    """A function that makes the position of each layer in turn."""
    check_heads(dim, heads)
    shared_biases = None
    if bias_sharing == "all-layers":
        shared_biases = TransformerXLBiases(heads, dim // heads)
    return lambda: TransformerXLPosition(dim, heads, biases=shared_biases, clamp=clamp_length, dropout=dropout)


def xl_model(
    vocab: int,
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    make_layer_attention: Callable[[int, XLAttentionMaker], Layer],
    make_position: Callable[[], Position],
    dropout: float,
    norm_order: NormOrder,
    details: XLDetails = PUBLISHED_DETAILS,
) -> LanguageModel:
    """A language model of Transformer-XL layers.

    `make_layer_attention` gets the layer's number, from 0, and a function that makes its attention, without biases and
    with a position from `make_position`. With norm orders other than post-norm the attention normalizes its own input,
    so that its memory holds the unnormalized stream."""
    check_heads(dim, heads)
    layer_norm = partial(nn.LayerNorm, dim, eps=details.norm_eps)
    std = init_std(dim)

    def layer(number: int) -> dict[str, Layer]:
        position = make_position()
        # inside the attention, not before it: what the memory holds is then normalized with what is new
        pre_norm = None if norm_order == "post" else layer_norm()

        def make_attention(kernel: Kernel, source: KVSource | None) -> Attention:
            return Attention(dim, heads, kernel, position=position, source=source, pre_norm=pre_norm, bias=False)

        inner = make_layer_attention(number, make_attention)
        join = AddJoin(dropout=dropout) if dropout else None
        post_norm, inner_norm = (layer_norm() if norm_order == order else None for order in ("post", "sandwich"))
        attention = Residual(inner, inner_norm=inner_norm, post_norm=post_norm, join=join)
        return {"attention": attention, "ff": FeedForward(dim, ff_dim, activation=details.make_activation())}

    body = stack(depth, layer, order=norm_order, norm=layer_norm, dropout=dropout)
    # N(0, std^2) for all matrices, without the smaller outputs of branches that GPT-2 has
    for module in body.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
    embed = TokenEmbedding(vocab, dim, scale=dim**0.5 if details.scaled_embedding else 1.0, std=std, dropout=dropout)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token, bias=details.head_bias))
