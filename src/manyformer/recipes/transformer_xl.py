"""Transformer-XL: segments that remember those before them."""

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import AddJoin, Chain, Layer, Pointwise, Residual
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward
from manyformer.kernels import Kernel, SoftmaxKernel
from manyformer.masks import Causal, Window
from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.position import Position, TransformerXLBiases, TransformerXLPosition
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, branch, init_std
from manyformer.sources import KVSource, SegmentMemorySource

BiasSharing = Literal["shared", "own"]


@recipe(
    "Transformer-XL",
    paper="Dai et al. 2019, Transformer-XL: Attentive Language Models beyond a Fixed-Length Context, arXiv:1901.02860",
    summary="Every layer also attends to what it was given in the segment before; distances, not positions, tell where.",
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="O(l (l + m) d + l d^2) per layer, m tokens remembered",
    reasons={"cross_attention": "a language model reads one sequence only"},
    # streaming is one pass as long as the memory holds everything
    tiny_keywords={"memory_length": 512},
)
def transformer_xl(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    memory_length: int | None = 512,
    context: Literal["growing", "equal"] = "growing",
    clamp_length: int | None = None,
    bias_sharing: BiasSharing = "shared",
    dropout: float = 0.1,
    norm_order: NormOrder = "post",
) -> LanguageModel:
    """The 12-layer model for enwik8 by default; `ff_dim` is 4 dim unless given. Data in lanes makes use of the memory.

    Memory and segment may be of other lengths in evaluation than in training: `memory_length`, `context` and
    `clamp_length` (for much longer memories, 820 in the paper's code) change no weight. With `context="equal"` the loss
    does not depend on how a text is cut. We drop out what branches give to the stream, embeddings and the sinusoids of
    distances; the code also inside the feed-forward layers and before the output. Matrices start as N(0, 0.4 / dim)
    where it has 0.02. With other norms than the paper's, the memory is of the bare stream, normed again when it is
    used."""
    if context == "equal" and memory_length is None:
        raise UserError("view 'equal' is of as many tokens as are remembered; set remembered, or view to growing")

    def attention(parts: XLAttentionParts) -> Layer:
        seen = Causal() if context == "growing" or memory_length is None else Window(memory_length)
        return parts.attention(
            SoftmaxKernel(seen), None if memory_length is None else SegmentMemorySource(memory_length, dim)
        )

    positions = xl_positions(dim, heads, clamp_length, bias_sharing, dropout)
    return xl_model(vocab, dim, depth, heads, ff_dim, attention, positions, dropout, norm_order)


class XLAttentionParts(NamedTuple):
    """What the attention of one layer is made of; `number` counts the layers from 0."""

    number: int
    dim: int
    heads: int
    position: Position
    before: nn.Module | None

    def attention(self, kernel: Kernel, source: KVSource | None) -> Attention:
        """Attention without biases, at these positions."""
        _, dim, heads, position, before = self
        return Attention(dim, heads, kernel, position=position, source=source, pre_norm=before, bias=False)


def xl_positions(
    dim: int, heads: int, clamp: int | None, biases: BiasSharing, dropout: float
) -> Callable[[], Position]:
    """What makes the position of one layer after the other."""
    check_heads(dim, heads)
    shared = TransformerXLBiases(heads, dim // heads) if biases == "shared" else None
    return lambda: TransformerXLPosition(dim, heads, biases=shared, clamp=clamp, dropout=dropout)


def check_heads(dim: int, heads: int) -> None:
    """Raise UserError where heads do not divide the model."""
    if dim % heads:
        raise UserError(f"dim ({dim}) must be a multiple of heads ({heads})")


def xl_model(
    vocab: int,
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    attention: Callable[[XLAttentionParts], Layer],
    positions: Callable[[], Position],
    dropout: float,
    norm_order: NormOrder,
) -> LanguageModel:
    """A language model with the layers of Transformer-XL, and in each what `positions` and `attention` make.

    Under other norms than post-norm the attention norms what goes into it by itself, so that what it remembers is the
    bare stream.
    """
    check_heads(dim, heads)
    layer_norm, std = partial(nn.LayerNorm, dim), init_std(dim)

    def layer(number: int) -> Chain:
        made = attention(
            XLAttentionParts(number, dim, heads, positions(), None if norm_order == "post" else layer_norm())
        )
        join = AddJoin(dropout=dropout) if dropout else None
        after, within = (layer_norm() if norm_order == order else None for order in ("post", "sandwich"))
        ff = branch(FeedForward(dim, ff_dim), order=norm_order, norm=layer_norm, dropout=dropout)
        return Chain(attention=Residual(made, inner_norm=within, post_norm=after, join=join), ff=ff)

    layers: dict[str, Layer] = {str(number): layer(number) for number in range(depth)}
    if norm_order != "post":
        layers["norm"] = Pointwise(layer_norm())
    body = Chain(**layers)
    for module in body.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
    embed = TokenEmbedding(vocab, dim, scale=dim**0.5, std=std, dropout=dropout)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))
