"""The Transformer: the encoder-decoder, and its encoder as a classifier of texts."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from torch import nn

from manyformer.models import ClassHead, EncoderDecoder, TextClassifier, TokenEmbedding
from manyformer.models.encoder_model import EncoderModel
from manyformer.models.tasks.text_labels import CLASSIFICATION
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.positions import LearnedPosition, NoPosition, Position, SinusoidalPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.attention_kernels import (
    CROSS,
    DECODER,
    ENCODER,
    WINDOW,
    AttentionName,
    AttentionRole,
    AttentionSizes,
    CrossKernel,
    DecoderKernel,
    EncoderKernel,
    KernelWindow,
    make_attention,
)
from manyformer.recipes.parts.baselines import NormOrder, check_heads, encoder_decoder, init_std, stack
from manyformer.recipes.parts.keywords import DecoderDepth, PositiveSize
from manyformer.recipes.parts.registry import recipe

EncoderDecoderPosition = Literal["sinusoid", "sinusoid-halves", "learned"]

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu-tanh": partial(nn.GELU, "tanh"),
    "silu": nn.SiLU,
}

EncoderT = TypeVar("EncoderT", bound=EncoderModel[Any])


@recipe(
    "Transformer",
    paper="Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762",
    summary="Attention alone carries information between positions: no recurrence, no convolution.",
    task=TRANSLATION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer with softmax kernels",
)
def transformer(
    vocab: int = 37000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
    max_length: int = 1024,
    kernel: AttentionName = "softmax",
    encoder_kernel: EncoderKernel = None,
    decoder_kernel: DecoderKernel = None,
    cross_kernel: CrossKernel = None,
    window: KernelWindow = WINDOW,
    *,
    decoder_depth: DecoderDepth = None,
    decoder_ff_dim: Annotated[PositiveSize | None, "ff_dim of the decoder; null means that of the encoder"] = None,
    activation: Annotated[
        Literal["relu", "gelu", "gelu-tanh", "silu"], "activation of feed-forward layers (BART: gelu, Marian: silu)"
    ] = "relu",
    position: Annotated[
        EncoderDecoderPosition,
        "positions added to embeddings: sinusoids, sinusoids with all sines first (Marian), or learned vectors up to "
        "max_length, others for each side (BART)",
    ] = "sinusoid",
    scaled_embedding: Annotated[bool, "token vectors are multiplied by sqrt(dim)"] = True,
    embedding_norm: Annotated[bool, "the embedding of each side ends in a norm (BART)"] = False,
    output_bias: Annotated[bool, "logits have a bias (BART, Marian)"] = False,
) -> EncoderDecoder:
    """Base of table 3 by default; `depth` layers on each side, one matrix for both embeddings and the output.

    With `source_vocab` the source has a separate embedding, for languages that share no vocabulary. `ff_dim` is 4 dim
    unless given. Sections 3.1 to 3.5 and 5.4; the published model is post-norm, `norm_order="pre"` trains more easily
    at larger depth. `kernel` and the keywords of each attention take the names that `compose` has, "linformer" (keys
    projected to a quarter of `max_length`), "collaborative" (heads share a quarter of dim) and the scores of
    `synthesizer`; a kernel that an attention cannot have is refused with the reason. The keywords after `window` make
    it BART (Lewis et al. 2020, arXiv:1910.13461), mBART (Liu et al. 2020, arXiv:2001.08210, with `norm_order="pre"`),
    Marian (Junczys-Dowmunt et al. 2018, arXiv:1804.00344) and Pegasus (Zhang et al. 2020, arXiv:1912.08777)."""
    check_heads(dim, heads)
    sizes = AttentionSizes(dim, heads, heads, max_length, window=window)

    # a keyword of one attention goes before `kernel`, which is for all three
    def attention(role: AttentionRole, own_kernel: str | None) -> Callable[[int], Layer]:
        return lambda number: make_attention(role, own_kernel or kernel, sizes)

    return encoder_decoder(
        *(vocab, source_vocab, dim, depth, heads, ff_dim, dropout, norm_order),
        make_encoder_attention=attention(ENCODER, encoder_kernel),
        make_decoder_attention=attention(DECODER, decoder_kernel),
        make_cross_attention=attention(CROSS, cross_kernel),
        embeddings=_embeddings(
            (source_vocab, vocab),
            dim,
            max_length,
            dropout,
            position,
            is_scaled=scaled_embedding,
            has_norm=embedding_norm,
        ),
        activation=ACTIVATIONS[activation],
        decoder_depth=decoder_depth,
        decoder_ff_dim=decoder_ff_dim,
        output_bias=output_bias,
    )


def _embeddings(
    vocabularies: tuple[int | None, int],
    dim: int,
    max_length: int,
    dropout: float,
    position: EncoderDecoderPosition,
    *,
    is_scaled: bool,
    has_norm: bool,
) -> tuple[TokenEmbedding, TokenEmbedding]:
    """The embeddings of source and target, which share what is not learned for each side."""
    std = None if is_scaled else init_std(dim)

    def embedding(vocab: int) -> TokenEmbedding:
        # learned positions begin at the scale of the token vectors that they are added to
        if position == "learned":
            added: Position = LearnedPosition(dim, max_length, std=1.0 if is_scaled else init_std(dim))
        else:
            added = SinusoidalPosition(dim, layout="interleaved" if position == "sinusoid" else "halves")
        norm = nn.LayerNorm(dim) if has_norm else None
        scale = dim**0.5 if is_scaled else 1.0
        return TokenEmbedding(vocab, dim, position=added, scale=scale, std=std, norm=norm, dropout=dropout)

    source_vocab, vocab = vocabularies
    target = embedding(vocab)
    if source_vocab is not None:
        return embedding(source_vocab), target
    # nothing is learned for each side, so that one module serves both
    if position != "learned" and not has_norm:
        return target, target
    source = embedding(vocab)
    # the sides have positions or norms of their own, and one matrix of tokens
    source.token = target.token
    return source, target


@recipe(
    "Transformer classifier",
    paper="Vaswani et al. 2017, arXiv:1706.03762 (encoder); Reimers and Gurevych 2019, arXiv:1908.10084 (mean pooling)",
    summary="The mean of the encoder's outputs represents the whole text.",
    task=CLASSIFICATION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
)
def transformer_classifier(
    vocab: int = 8000,
    classes: int = 2,
    dim: int = 256,
    depth: int = 4,
    heads: int = 4,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> TextClassifier:
    """An encoder with sinusoids, mean pooling and one projection; `ff_dim` is 4 dim unless given."""
    return encoder(
        TextClassifier, vocab, classes, dim, depth, heads, ff_dim, dropout, norm_order, position=SinusoidalPosition(dim)
    )


def encoder(
    model_class: Callable[[TokenEmbedding, Layer, ClassHead], EncoderT],
    vocab: int,
    classes: int,
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    dropout: float,
    norm_order: NormOrder,
    *,
    position: Position | None = None,
    make_relative_position: Callable[[], Position] = NoPosition,
) -> EncoderT:
    """An encoder with one projection, `position` added to its embedding, and relative positions in its attention."""

    def layer(number: int) -> dict[str, Layer]:
        attention = Attention(dim, heads, SoftmaxKernel(), position=make_relative_position())
        return {"attention": attention, "ff": FeedForward(dim, ff_dim)}

    embed = TokenEmbedding(vocab, dim, position=position, scale=dim**0.5, dropout=dropout)
    body = stack(depth, layer, order=norm_order, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    return model_class(embed, body, ClassHead(dim, classes, bias=True))
