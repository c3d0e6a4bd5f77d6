"""The encoder-decoder Transformer."""

from collections.abc import Callable
from functools import partial

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Causal
from manyformer.models import ClassHead, EncoderDecoder, TokenEmbedding
from manyformer.position import Position, SinusoidalPosition
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, stack
from manyformer.sources import CrossAttentionSource
from manyformer.tasks.translation import TRANSLATION


@recipe(
    "Transformer",
    paper="Vaswani et al. 2017, Attention Is All You Need, arXiv:1706.03762",
    summary="Attention alone carries information between positions: no recurrence, no convolution.",
    task=TRANSLATION,
    cost="O(l^2 d + l d^2) per layer",
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
) -> EncoderDecoder:
    """Base of table 3 by default; `depth` layers on each side, one matrix for both embeddings and the output.

    With `source_vocab` the source has a separate embedding, for languages that share no vocabulary. `ff_dim` is 4 dim
    unless given. Sections 3.1 to 3.5 and 5.4; the published model is post-norm, `norm_order="pre"` trains more easily
    at larger depth."""
    return encoder_decoder(vocab, source_vocab, dim, depth, heads, ff_dim, dropout, norm_order)


def encoder_decoder(
    vocab: int,
    source_vocab: int | None,
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    dropout: float,
    norm_order: NormOrder,
    *,
    make_position: Callable[[], Position] | None = None,
    make_encoder_attention: Callable[[int], Layer] | None = None,
    make_decoder_attention: Callable[[int], Layer] | None = None,
) -> EncoderDecoder:
    """The Transformer, optionally with positions other than sinusoids or another self-attention on either side."""
    norm = partial(nn.LayerNorm, dim)

    encoder_attention = make_encoder_attention or (lambda number: Attention(dim, heads, SoftmaxKernel()))
    decoder_attention = make_decoder_attention or (lambda number: Attention(dim, heads, SoftmaxKernel(Causal())))

    def encoder_layer(number: int) -> dict[str, Layer]:
        return {"attention": encoder_attention(number), "ff": FeedForward(dim, ff_dim)}

    def decoder_layer(number: int) -> dict[str, Layer]:
        return {
            "attention": decoder_attention(number),
            "cross": Attention(dim, heads, SoftmaxKernel(), source=CrossAttentionSource()),
            "ff": FeedForward(dim, ff_dim),
        }

    def embedding(size: int) -> TokenEmbedding:
        position = SinusoidalPosition(dim) if make_position is None else make_position()
        return TokenEmbedding(size, dim, position=position, scale=dim**0.5, dropout=dropout)

    embed = embedding(vocab)
    embed_source = embed if source_vocab is None else embedding(source_vocab)
    encoder = stack(depth, encoder_layer, order=norm_order, norm=norm, dropout=dropout)
    decoder = stack(depth, decoder_layer, order=norm_order, norm=norm, dropout=dropout)
    return EncoderDecoder(embed_source, encoder, embed, decoder, ClassHead(dim, vocab, tied=embed.token))
