"""What recipes are built from: residual branches, stacks of layers, and the models of which most recipes vary one part.

The models are language models like GPT-2 and Llama, encoders like BERT, and the Transformer."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Literal

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, EncoderDecoder, LanguageModel, MaskedLM, TokenEmbedding
from manyformer.models.head import CappedClassHead
from manyformer.models.masked_lm import PartContrastiveLoss
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.global_summaries import SummaryPrefixedLayer, SummaryTokens
from manyformer.nn.attention.kv_cache import CrossAttentionSource
from manyformer.nn.core import Chain, Layer, LayeredStack, Pointwise
from manyformer.nn.depth import ReversibleStack
from manyformer.nn.feed_forward import ExpertLinear
from manyformer.nn.feed_forward.feedforward import FeedForward, chunked
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.masks import Causal
from manyformer.nn.positions import (
    ConcatenatedGridPosition,
    LearnedPosition,
    Position,
    SinusoidalPosition,
    SummedGridPosition,
)
from manyformer.nn.residual import AddJoin, Residual, ResidualJoin
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.streams import StreamLayer, StreamStack
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.residual_streams import Streams

NormOrder = Literal["post", "pre", "sandwich"]
LoopCount = Annotated[PositiveSize, "how many times the layers are applied, with the same weights each time"]
NormMaker = Callable[[], nn.Module]
LayerMaker = Callable[[int], Mapping[str, Layer] | Layer]
"""Makes the layer of a number, counted from 0: its branches by name, or a complete layer."""
LayerMakers = LayerMaker | Sequence[LayerMaker]
"""A maker of all layers, or several that take turns."""


def branch(
    inner: Layer, *, order: NormOrder, norm: NormMaker, dropout: float = 0.0, join: ResidualJoin | None = None
) -> Residual:
    """`inner` as a residual branch, normalized after the sum, before the branch, or before and after the branch.

    `join` takes the place of the sum after `dropout`."""
    if dropout and join is None:
        join = AddJoin(dropout=dropout)
    if order == "post":
        return Residual(inner, post_norm=norm(), join=join)
    if order == "pre":
        return Residual(inner, pre_norm=norm(), join=join)
    if order == "sandwich":
        return Residual(inner, pre_norm=norm(), inner_norm=norm(), join=join)
    raise ValueError(f"norm_order ('{order}') must be post, pre or sandwich")


def stack(
    depth: int,
    layer: LayerMakers,
    *,
    order: NormOrder,
    norm: NormMaker,
    dropout: float,
    streams: Streams = "plain",
    std: float | None = None,
    join: Callable[[], ResidualJoin | None] = lambda: None,
    loops: int = 1,
) -> LayeredStack:
    """`depth` layers made by `layer`, or by several makers in turn; all orders but post-norm end in a final norm.

    The layers are applied `loops` times, with the same weights (Bae et al. 2024, arXiv:2410.20672, section 2.2: CYCLE).

    A mapping becomes a chain of residual branches with norms and dropout, except parts that are residual branches
    already; a layer is taken as it is. What a maker returns again is the same layer in another place. With "reversible"
    streams, branches are added alternately to two streams, and no activations are stored (see `ReversibleStack`); with
    a maker of rules, branches read and write by its rule (see `StreamStack`). `std` initializes the matrices with
    `scale_residual_init`. `join` makes the join of each branch, None for the sum after `dropout`. Raises UserError for
    loops of streams that are not plain, and for post-norm with a rule."""
    if loops > 1 and streams != "plain":
        raise UserError(f"loops ({loops}) need residual_streams=plain: layers with further streams are applied once")
    has_rule = not isinstance(streams, str)
    if has_rule and order == "post":
        raise UserError(
            "norm_order is post, and these residual_streams take what a branch adds before any norm of a sum: use "
            "norm_order=pre or sandwich, or residual_streams=plain"
        )
    container = StreamLayer if has_rule else Chain

    complete = partial(complete_layer, order=order, norm=norm, dropout=dropout, join=join, container=container)
    makers = [layer] if callable(layer) else layer
    made: list[Layer] = []
    # kept with their parts, whose identity is theirs alone as long as they exist
    completed: dict[int, tuple[Mapping[str, Layer] | Layer, Layer]] = {}
    for number in range(depth):
        parts = makers[number % len(makers)](number)
        if id(parts) not in completed:
            completed[id(parts)] = parts, complete(parts)
        made.append(completed[id(parts)][1])
    # the same modules under the numbers of all places, registered under the first
    body: dict[str, Layer] = {str(number): part for number, part in enumerate(made * loops)}
    if streams == "reversible":
        body = {"layers": ReversibleStack(**body)}
    # pre-norm leaves the stream itself unnormalized
    if order != "post":
        body["norm"] = Pointwise(norm())
    result: LayeredStack
    if isinstance(streams, str):
        result = Chain(**body)
    else:
        rule = streams([len(list(part.children())) for part in made])
        result = StreamStack(rule, **body)
    if std is not None:
        # a branch of a looped layer is added once in each loop
        scale_residual_init(result, depth * loops, std=std)
    return result


def complete_layer(
    parts: Mapping[str, Layer] | Layer,
    *,
    order: NormOrder,
    norm: NormMaker,
    dropout: float,
    join: Callable[[], ResidualJoin | None] = lambda: None,
    container: Callable[..., Layer] = Chain,
) -> Layer:
    """What a maker of `stack` has made, as the layer that it becomes there: a `container` of its branches."""
    if isinstance(parts, Layer):
        return parts
    add_branch = partial(branch, order=order, norm=norm, dropout=dropout)
    return container(
        **{name: part if isinstance(part, Residual) else add_branch(part, join=join()) for name, part in parts.items()}
    )


def makers_of_pattern(pattern: str, makers: Mapping[str, LayerMaker], keyword: str = "pattern") -> list[LayerMaker]:
    """The makers of layers by the letters of a pattern, which take turns in `stack`. Raises UserError for others."""
    if not pattern or set(pattern) - makers.keys():
        raise UserError(f"{keyword} ('{pattern}') must have one letter or more, of {', '.join(makers)}")
    return [makers[letter] for letter in pattern]


def check_heads(dim: int, heads: int) -> None:
    """Raise UserError unless `heads` divides `dim`."""
    if dim % heads:
        raise UserError(f"dim ({dim}) must be a multiple of heads ({heads})")


def head_width(dim: int, heads: int, head_dim: int | None) -> int:
    """The width of a head: `head_dim`, or by default dim / heads. Raises UserError where heads must divide dim."""
    if head_dim is not None:
        return head_dim
    check_heads(dim, heads)
    return dim // heads


def init_std(dim: int) -> float:
    """The deviation sqrt(2 / (5 dim)) of Nguyen and Salazar 2019 (arXiv:1910.05895), section 2.2; 0.023 at dim 768.

    GPT-2 and BERT have 0.02 at that width. With 0.02 narrow models take longer to train."""
    return math.sqrt(2 / (5 * dim))


def scale_residual_init(body: nn.Module, depth: int, *, std: float) -> None:
    """Initialize all matrices from N(0, std^2), output projections of branches with std / sqrt(2 depth).

    Radford et al. 2019, section 2.3: the sum of 2 x depth branches then starts at the scale of one."""
    for name, module in body.named_modules():
        if isinstance(module, nn.Linear | ExpertLinear):
            # what is written to the stream: the last matrix of attention and of a feed-forward layer
            is_branch_output = name.endswith((".out_proj", ".down"))
            nn.init.normal_(module.weight, std=std / (2 * depth) ** 0.5 if is_branch_output else std)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


AddedPosition = Annotated[
    Literal["sinusoid", "learned"], "positions added to embeddings: sinusoids, or learned vectors up to max_length"
]
"""Positions that are added to token embeddings."""


def sinusoidal_embedding(vocab: int, dim: int, *, dropout: float) -> TokenEmbedding:
    """A token embedding with sinusoidal positions, which allow any length."""
    # section 3.4 of the Transformer: token vectors are multiplied by sqrt(dim), which gives them the scale of sinusoids
    return TokenEmbedding(vocab, dim, position=SinusoidalPosition(dim), scale=dim**0.5, dropout=dropout)


def learned_embedding(vocab: int, dim: int, max_length: int, *, dropout: float) -> TokenEmbedding:
    """A token embedding with learned positions for up to `max_length` tokens."""
    std = init_std(dim)
    return TokenEmbedding(vocab, dim, position=LearnedPosition(dim, max_length, std=std), std=std, dropout=dropout)


def grid_embedding(vocab: int, dim: int, rows: int, columns: int, *, dropout: float) -> TokenEmbedding:
    """A token embedding with the sum of a learned vector for the row and one for the column of each position."""
    std = init_std(dim)
    axes = [LearnedPosition(dim, size, std=std) for size in (rows, columns)]
    position = SummedGridPosition((rows, columns), axes)
    return TokenEmbedding(vocab, dim, position=position, std=std, dropout=dropout)


def grid_of_vectors(vocab: int, shape: tuple[int, int], dims: tuple[int, int], *, dropout: float) -> TokenEmbedding:
    """A token embedding with the concatenation of a learned vector for the row and one for the column of a position."""
    std = init_std(sum(dims))
    axes = [LearnedPosition(dim, size, std=std) for dim, size in zip(dims, shape, strict=True)]
    position = ConcatenatedGridPosition(shape, axes)
    return TokenEmbedding(vocab, sum(dims), position=position, std=std, dropout=dropout)


def axial_embedding(vocab: int, dim: int, max_length: int, *, dropout: float) -> TokenEmbedding:
    """A token embedding with axial positions, for up to `max_length` tokens in the most square grid of so many cells.

    Half of the channels are a learned vector of the row, half one of the column (Kitaev et al. 2020, released code).
    Raises UserError for a prime `max_length`, or an odd width.
    """
    # the largest divisor up to the root: the most square grid has the fewest vectors
    rows = next(size for size in range(math.isqrt(max_length), 0, -1) if max_length % size == 0)
    if rows == 1 or dim % 2:
        raise UserError(
            f"axial positions are a grid: max_length ({max_length}) must be a product of two numbers above 1, and dim "
            f"({dim}) even"
        )
    return grid_of_vectors(vocab, (rows, max_length // rows), (dim // 2, dim // 2), dropout=dropout)


def embedding_with(position: AddedPosition, vocab: int, dim: int, max_length: int, *, dropout: float) -> TokenEmbedding:
    """A token embedding with positions of either kind."""
    if position == "sinusoid":
        return sinusoidal_embedding(vocab, dim, dropout=dropout)
    return learned_embedding(vocab, dim, max_length, dropout=dropout)


def gelu_layers(
    dim: int,
    ff_dim: int | None,
    make_attention: Callable[[int], Layer],
    *,
    make_activation: Callable[[], nn.Module] = nn.GELU,
) -> LayerMaker:
    """Layers with attention from `make_attention`, given the layer's number from 0, and a GELU feed-forward layer.

    `make_activation` may make another activation."""
    return lambda number: {
        "attention": make_attention(number),
        "ff": FeedForward(dim, ff_dim, activation=make_activation()),
    }


def attention_layers(
    dim: int,
    heads: int,
    ff_dim: int | None,
    make_kernel: Callable[[int], Kernel],
    *,
    position: Position | None = None,
    make_activation: Callable[[], nn.Module] = nn.GELU,
) -> LayerMaker:
    """Layers with kernels from `make_kernel`, given the layer's number from 0, and one `position` for all."""

    def attention(number: int) -> Layer:
        return Attention(dim, heads, make_kernel(number), position=position)

    return gelu_layers(dim, ff_dim, attention, make_activation=make_activation)


def decoder_layers(
    dim: int, heads: int, ff_dim: int | None, *, make_activation: Callable[[], nn.Module] = nn.GELU
) -> LayerMaker:
    """The layers of a decoder with a source: causal attention, attention to the source, and a feed-forward layer."""
    return lambda number: {
        "attention": Attention(dim, heads, SoftmaxKernel(Causal())),
        "cross": Attention(dim, heads, SoftmaxKernel(), source=CrossAttentionSource()),
        "ff": FeedForward(dim, ff_dim, activation=make_activation()),
    }


def language_model(
    embed: TokenEmbedding,
    depth: int,
    layer: LayerMakers,
    *,
    dropout: float,
    norm_order: NormOrder = "pre",
    norm: NormMaker | None = None,
    streams: Streams = "plain",
    loops: int = 1,
    join: Callable[[], ResidualJoin | None] = lambda: None,
    tied: bool = True,
    logit_cap: float | None = None,
    scaled_init: bool = True,
) -> LanguageModel:
    """GPT-2 with this embedding, `tied` to the output, and these layers, applied `loops` times.

    Without `scaled_init` the layers keep the initial matrices that they were made with."""
    vocab, dim = embed.token.weight.shape
    body = stack(
        depth,
        layer,
        order=norm_order,
        norm=partial(nn.LayerNorm, dim) if norm is None else norm,
        dropout=dropout,
        streams=streams,
        std=init_std(dim) if scaled_init else None,
        join=join,
        loops=loops,
    )
    shared = embed.token if tied else None
    if logit_cap is None:
        return LanguageModel(embed, body, ClassHead(dim, vocab, tied=shared))
    return LanguageModel(embed, body, CappedClassHead(dim, vocab, logit_cap, tied=shared))


def rms_decoder(
    vocab: int,
    dim: int,
    depth: int,
    layer: LayerMakers,
    *,
    dropout: float,
    norm_order: NormOrder = "pre",
    norm_eps: float | None = 1e-6,
    tied: bool = False,
    logit_cap: float | None = None,
    embedding_scale: float = 1.0,
    loops: int = 1,
    streams: Streams = "plain",
) -> LanguageModel:
    """Llama with these layers: RMSNorm, and an output of its own; positions are those of the layers, if any."""
    embed = TokenEmbedding(vocab, dim, scale=embedding_scale, std=init_std(dim), dropout=dropout)
    norm = partial(RMSNorm, dim, norm_eps)
    return language_model(
        embed,
        depth,
        layer,
        dropout=dropout,
        norm_order=norm_order,
        norm=norm,
        loops=loops,
        streams=streams,
        tied=tied,
        logit_cap=logit_cap,
    )


def masked_lm(
    embed: TokenEmbedding,
    depth: int,
    layer: LayerMakers,
    *,
    dropout: float,
    norm_order: NormOrder = "pre",
    norm: NormMaker | None = None,
    streams: Streams = "plain",
    summaries: SummaryTokens | None = None,
    contrast: PartContrastiveLoss | None = None,
    make_activation: Callable[[], nn.Module] = nn.GELU,
) -> MaskedLM:
    """An encoder with BERT's head: a dense layer, GELU, a norm, and a projection with a bias, tied to the embedding.

    `summaries` are prefixed to each text in all layers; `make_activation` makes the activation of the head."""
    vocab, dim = embed.token.weight.shape
    norm = partial(nn.LayerNorm, dim) if norm is None else norm
    body: Layer = stack(depth, layer, order=norm_order, norm=norm, dropout=dropout, streams=streams, std=init_std(dim))
    if summaries is not None:
        body = SummaryPrefixedLayer(body, dim, summaries)
    transform = nn.Sequential(nn.Linear(dim, dim), make_activation(), norm())
    return MaskedLM(
        embed, body, ClassHead(dim, vocab, tied=embed.token, transform=transform, bias=True), contrast=contrast
    )


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
    make_cross_attention: Callable[[int], Layer] | None = None,
    embeddings: tuple[TokenEmbedding, TokenEmbedding] | None = None,
    activation: Callable[[], nn.Module] = nn.ReLU,
    decoder_depth: int | None = None,
    decoder_ff_dim: int | None = None,
    output_bias: bool = False,
    streams: Streams = "plain",
    ff_chunk: int | None = None,
) -> EncoderDecoder:
    """The Transformer, optionally with positions other than sinusoids or other kinds of attention.

    `embeddings` are those of source and target, and the decoder is like the encoder unless its sizes are given."""
    norm = partial(nn.LayerNorm, dim)

    encoder_attention = make_encoder_attention or (lambda number: Attention(dim, heads, SoftmaxKernel()))
    decoder_attention = make_decoder_attention or (lambda number: Attention(dim, heads, SoftmaxKernel(Causal())))
    cross_attention = make_cross_attention or (
        lambda number: Attention(dim, heads, SoftmaxKernel(), source=CrossAttentionSource())
    )

    def feed_forward(hidden_dim: int | None) -> Layer:
        return chunked(FeedForward(dim, hidden_dim, activation=activation()), ff_chunk)

    def encoder_layer(number: int) -> dict[str, Layer]:
        return {"attention": encoder_attention(number), "ff": feed_forward(ff_dim)}

    def decoder_layer(number: int) -> dict[str, Layer]:
        return {
            "attention": decoder_attention(number),
            "cross": cross_attention(number),
            "ff": feed_forward(decoder_ff_dim or ff_dim),
        }

    def embedding(size: int) -> TokenEmbedding:
        position = SinusoidalPosition(dim) if make_position is None else make_position()
        return TokenEmbedding(size, dim, position=position, scale=dim**0.5, dropout=dropout)

    # one vocabulary for both sides: one embedding, whose matrix is that of the output too (section 3.4)
    if embeddings is None:
        embed = embedding(vocab)
        embeddings = embed if source_vocab is None else embedding(source_vocab), embed
    embed_source, embed = embeddings
    make_stack = partial(stack, order=norm_order, norm=norm, dropout=dropout, streams=streams)
    encoder = make_stack(depth, encoder_layer)
    decoder = make_stack(decoder_depth or depth, decoder_layer)
    head = ClassHead(dim, vocab, tied=embed.token, bias=output_bias)
    return EncoderDecoder(embed_source, encoder, embed, decoder, head)
