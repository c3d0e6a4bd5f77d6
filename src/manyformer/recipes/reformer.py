"""The Reformer: attention to similar tokens found by locality-sensitive hashing, in reversible layers.

Four models: the published algorithm as a language model, a strictly causal one, an encoder, and an encoder-decoder."""

from functools import partial
from typing import Annotated, Any, Literal, TypedDict, Unpack

from torch import nn

from manyformer.base.errors import UserError
from manyformer.models import ClassHead, EncoderDecoder, LanguageModel, MaskedLM, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.models.tasks.translation import TRANSLATION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.clustered.lsh_kernel import LSHKernel, LSHVariant
from manyformer.nn.core import Chain, Layer, Pointwise
from manyformer.nn.depth import ReversibleStack
from manyformer.nn.feed_forward.feedforward import FeedForward, chunked
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.masks import Causal, LocalBlocks, Mask
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import (
    LayerMaker,
    axial_embedding,
    embedding_with,
    encoder_decoder,
    grid_of_vectors,
    init_std,
    language_model,
    masked_lm,
    stack,
)
from manyformer.recipes.parts.keywords import Default, FeedForwardChunk, HeadDim, NormEps, PositiveSize
from manyformer.recipes.parts.registry import recipe
from manyformer.recipes.parts.residual_streams import ResidualStreams, residual_streams_of

PAPER = "Kitaev et al. 2020, Reformer: The Efficient Transformer, arXiv:2001.04451"

SUMMARY = (
    "Hashing selects the keys that a query attends to; two residual streams let inputs be recomputed from outputs."
)

COST = "O(num_hashes l (chunk_length + num_buckets) d + l d^2) per layer; activation memory does not grow with depth"

TINY = {"num_buckets": 2, "chunk_length": 8, "num_hashes": 4, "position": "learned"}

SELF_ATTENTION_ONLY = (
    "queries and keys are the same vectors of one sequence; the paper's translation model is `reformer-seq2seq`"
)

ReformerPosition = Annotated[
    Literal["sinusoid", "learned", "axial"],
    "positions added to embeddings: sinusoids, or learned vectors up to max_length, one for each position, or "
    "one for its row and one for its column in a grid (axial)",
]

BucketCount = Annotated[PositiveSize, "number of hash buckets in each hash round; 1 or even"]


class ReformerOptions(TypedDict, total=False):
    """The keywords that all forms of the Reformer share."""

    chunk_length: Annotated[
        PositiveSize, "number of sorted tokens in a chunk, which attends to itself and the chunk before", Default(64)
    ]
    num_hashes: Annotated[
        PositiveSize, "number of hash rounds, each with other random rotations; may change after training", Default(4)
    ]
    lsh_every: Annotated[
        PositiveSize,
        "in each group of so many layers the last uses LSH attention, the others local attention; 1 means LSH in all",
        Default(1),
    ]
    ff_chunk: Annotated[FeedForwardChunk, Default(None)]
    residual_streams: Annotated[ResidualStreams, Default("reversible")]
    scale: Annotated[float, "factor on LSH attention scores, which are products with keys of length 1", Default(1.0)]
    position: Annotated[ReformerPosition, Default("sinusoid")]
    max_length: Annotated[int, Default(1024)]
    dropout: Annotated[float, Default(0.0)]


@recipe(
    "Reformer",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    family="clustered",
    cost=COST,
    reasons={
        "causal": "later tokens have zero weight, but they shift the chunk boundaries and so change which earlier "
        "tokens are attended to; `reformer-strict` is causal",
        "incremental_decoding": "a later token changes which earlier tokens are attended to, so no state can be cached",
        "cross_attention": SELF_ATTENTION_ONLY,
        "attention_dropout": "tokens of a bucket attend to each other in a kernel of its own",
    },
    tiny_keywords=TINY,
)
def reformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    num_buckets: BucketCount = 64,
    *,
    head_dim: HeadDim = None,
    axial_rows: Annotated[
        PositiveSize | None, "rows of the grid of axial positions; null means the most square grid of max_length"
    ] = None,
    axial_row_dim: Annotated[PositiveSize | None, "channels of axial positions for the row; null means half"] = None,
    output: Annotated[
        Literal["tied", "concat"],
        "the output is tied to the embedding and reads the mean of both streams, or has a matrix of its own and "
        "reads both side by side (released models)",
    ] = "tied",
    output_bias: Annotated[bool, "logits have a bias (released models); needs output=concat"] = False,
    norm_eps: NormEps = 1e-5,
    **options: Unpack[ReformerOptions],
) -> LanguageModel:
    """The published algorithm as a language model: sections 2 and 3, pre-norm, with a tied output.

    In each group of `lsh_every` layers the last has LSH attention and the others attend to their block of
    `chunk_length` tokens and the previous one; 1 means LSH in all layers. `num_hashes` is not a weight and may change
    after training. The number of buckets does not depend on the length, as it does in the paper (2 l / chunk there).
    The two streams are averaged at the end, where the released code concatenates them. Scores, products with keys of
    length 1, are multiplied by `scale`: 1 as in the paper, 1 / sqrt(e) in a widespread package, e the width of a head.
    With a small scale vectors become similar before attention becomes sharp, which helps positions that must match each
    other. Positions are sinusoids, or learned ones up to `max_length`; those of the released models are axial, half of
    the channels for the row and half for the column of the most square grid of `max_length` positions, or of
    `axial_rows`; with `output="concat"` the streams are concatenated."""
    if axial_rows is None:
        embed = _embedding(vocab, dim, options)
    else:
        columns = options["max_length"] // axial_rows
        row_dim = axial_row_dim or dim // 2
        if options["position"] != "axial" or axial_rows * columns != options["max_length"] or not row_dim < dim:
            raise UserError(
                f"axial_rows ({axial_rows}) needs position=axial, and must divide max_length "
                f"({options['max_length']}); axial_row_dim ({row_dim}) must be below dim ({dim})"
            )
        dims = (row_dim, dim - row_dim)
        embed = grid_of_vectors(vocab, (axial_rows, columns), dims, dropout=options["dropout"])
    layer = _layers(dim, heads, ff_dim, num_buckets, options, variant="published", head_dim=head_dim)
    dropout = options["dropout"]
    kind = options["residual_streams"]
    streams = residual_streams_of(kind, dim)
    norm = partial(nn.LayerNorm, dim, eps=norm_eps)
    if output == "tied":
        if output_bias:
            raise UserError("output_bias is true, and an output tied to the embedding has none: use output=concat")
        # averaged at the end, the two streams have the width of the embedding, to which the output is tied
        return language_model(embed, depth, layer, dropout=dropout, streams=streams, norm=norm)
    if kind != "reversible":
        raise UserError(f"output is {output}, and residual_streams={kind} has no two streams")
    # the layers alone: released models normalize both streams together, over 2 dim channels, behind the last layer
    plain = stack(depth, layer, order="pre", norm=norm, dropout=dropout, std=init_std(dim))
    layers: dict[str, Any] = {name: part for name, part in plain.named_children() if name != "norm"}
    both = ReversibleStack("concat", **layers)
    body = Chain(layers=both, norm=Pointwise(nn.LayerNorm(2 * dim, eps=norm_eps)))
    return LanguageModel(embed, body, ClassHead(2 * dim, vocab, bias=output_bias))


@recipe(
    "Reformer, strictly causal",
    paper=PAPER,
    summary="Chunks start with their bucket, so which tokens are attended to depends on the past alone.",
    task=LANGUAGE_MODELLING,
    family="clustered",
    cost=f"{COST}; O(num_hashes l + l d) per generated token",
    reasons={
        "cross_attention": SELF_ATTENTION_ONLY,
        "attention_dropout": "tokens of a bucket attend to each other in a kernel of its own",
    },
    tiny_keywords=TINY,
)
def reformer_strict(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    num_buckets: BucketCount = 32,
    **options: Unpack[ReformerOptions],
) -> LanguageModel:
    """`reformer` whose buckets each start a new chunk, so that no later token shifts a chunk boundary.

    In every hash round a token attends to the earlier tokens of its bucket in its own chunk and the previous one:
    decoding token by token gives the same as one pass. Chunks are not all full, so fewer, larger buckets are better."""
    layer = _layers(dim, heads, ff_dim, num_buckets, options, variant="strict")
    streams = residual_streams_of(options["residual_streams"], dim)
    return language_model(_embedding(vocab, dim, options), depth, layer, dropout=options["dropout"], streams=streams)


@recipe(
    "Reformer encoder",
    paper=PAPER,
    summary=SUMMARY,
    task=MASKED_LM,
    family="clustered",
    cost=COST,
    reasons={
        "cross_attention": SELF_ATTENTION_ONLY,
        "attention_dropout": "tokens of a bucket attend to each other in a kernel of its own",
    },
    tiny_keywords=TINY,
)
def reformer_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    num_buckets: BucketCount = 64,
    **options: Unpack[ReformerOptions],
) -> MaskedLM:
    """`reformer` that also attends to the next chunk, for masked tokens, with the head of `bert`."""
    layer = _layers(dim, heads, ff_dim, num_buckets, options, variant="published", chunks_after=1)
    streams = residual_streams_of(options["residual_streams"], dim)
    return masked_lm(_embedding(vocab, dim, options), depth, layer, dropout=options["dropout"], streams=streams)


@recipe(
    "Reformer, encoder-decoder",
    paper=PAPER,
    summary="Two residual streams on each side let inputs be recomputed from outputs, those of cross-attention too.",
    task=TRANSLATION,
    family="clustered",
    cost="O(l^2 d + l d^2) per layer; activation memory does not grow with depth",
    tiny_keywords={"num_buckets": 2, "chunk_length": 8},
)
def reformer_seq2seq(
    vocab: int = 37000,
    source_vocab: int | None = None,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    kernel: Annotated[
        Literal["softmax", "lsh"],
        "self-attention of both sides: to all tokens, as the paper translates, or to those of the same hash bucket",
    ] = "softmax",
    num_buckets: BucketCount = 16,
    chunk_length: Annotated[PositiveSize, "number of sorted tokens in a chunk of kernel=lsh"] = 32,
    num_hashes: Annotated[PositiveSize, "number of hash rounds of kernel=lsh"] = 4,
    residual_streams: ResidualStreams = "reversible",
    ff_chunk: FeedForwardChunk = None,
    dropout: float = 0.1,
) -> EncoderDecoder:
    """The reversible Transformer of sections 3 and 5, pre-norm: self-attention, cross-attention and feed-forward add to
    the two streams in turn, and the streams are averaged at the end of each side.

    The paper translates with full attention, because sentences are shorter than 128 tokens. With `kernel="lsh"` tokens
    attend to those of their hash bucket, in the encoder also in the next chunk; buckets of the decoder each begin a new
    chunk, as in `reformer-strict`, so that it decodes token by token. Cross-attention is always to all tokens, whose
    keys are not the queries."""

    def attention(number: int, *, causal: bool) -> Layer:
        if kernel == "softmax":
            return Attention(dim, heads, SoftmaxKernel(Causal() if causal else None))
        lsh = LSHKernel(
            num_buckets=num_buckets,
            chunk_length=chunk_length,
            num_hashes=num_hashes,
            # an encoder may look at the chunk behind its own as well
            chunks_after=0 if causal else 1,
            variant="strict" if causal else "published",
        )
        return Attention(dim, heads, lsh, bias=False)

    return encoder_decoder(
        *(vocab, source_vocab, dim, depth, heads, ff_dim, dropout, "pre"),
        make_encoder_attention=lambda number: attention(number, causal=False),
        make_decoder_attention=lambda number: attention(number, causal=True),
        streams=residual_streams_of(residual_streams, dim),
        ff_chunk=ff_chunk,
    )


def _embedding(vocab: int, dim: int, options: ReformerOptions) -> TokenEmbedding:
    position = options["position"]
    sizes = (vocab, dim, options["max_length"])
    if position == "axial":
        return axial_embedding(*sizes, dropout=options["dropout"])
    return embedding_with(position, *sizes, dropout=options["dropout"])


def _layers(
    dim: int,
    heads: int,
    ff_dim: int | None,
    num_buckets: int,
    options: ReformerOptions,
    *,
    variant: LSHVariant,
    chunks_after: int = 0,
    head_dim: int | None = None,
) -> LayerMaker:
    """LSH attention in the last of each group of `lsh_every` layers, local attention in the others.

    It is causal unless `chunks_after` is given."""
    size = options["chunk_length"]
    # the reach of a sorted chunk, in the order of the text
    local_mask: Mask = LocalBlocks(size, lookback=size, lookahead=chunks_after * size)
    if not chunks_after:
        local_mask = Causal() & local_mask

    def kernel(number: int) -> Kernel:
        # local layers have separate queries and keys; LSH needs them equal, or similar tokens would hash apart
        if (number + 1) % options["lsh_every"]:
            return SoftmaxKernel(local_mask)
        return LSHKernel(
            num_buckets=num_buckets,
            chunk_length=size,
            num_hashes=options["num_hashes"],
            scale=options["scale"],
            chunks_after=chunks_after,
            variant=variant,
        )

    return lambda number: {
        "attention": Attention(dim, heads, kernel(number), head_dim=head_dim, value_dim=head_dim, bias=False),
        "ff": chunked(FeedForward(dim, ff_dim), options["ff_chunk"]),
    }
