"""The Reformer: attention to similar tokens found by locality-sensitive hashing, in reversible layers."""

from collections.abc import Callable
from functools import partial
from typing import Annotated

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer
from manyformer.feedforward import FeedForward, chunked
from manyformer.kernels import Kernel, LSHKernel, SoftmaxKernel
from manyformer.masks import Causal, LocalBlocks, Mask
from manyformer.models import ClassHead, LanguageModel, MaskedLM
from manyformer.recipes.baselines import AddedPosition, embedding_with
from manyformer.recipes.keywords import FeedForwardChunk, PositiveInt
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import ResidualStreams, init_std, scale_residual_init, stack
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.tasks.masked_lm import MASKED_LM

PAPER = "Kitaev et al. 2020, Reformer: The Efficient Transformer, arXiv:2001.04451"
SUMMARY = (
    "Hashing selects the keys that a query attends to; two residual streams let inputs be recomputed from outputs."
)
COST = "O(num_hashes l (chunk_length + num_buckets) d + l d^2) per layer; activation memory does not grow with depth"
TINY = {"num_buckets": 2, "chunk_length": 8, "num_hashes": 4, "position": "learned"}
SELF_ATTENTION_ONLY = (
    "queries and keys are the same vectors of one sequence; the paper's translation model has full cross-attention"
)

BucketCount = Annotated[PositiveInt, "number of hash buckets in each hash round; 1 or even"]
ChunkLength = Annotated[PositiveInt, "number of sorted tokens in a chunk, which attends to itself and the chunk before"]
HashCount = Annotated[PositiveInt, "number of hash rounds, each with other random rotations; may change after training"]
LSHInterval = Annotated[
    PositiveInt,
    "in each group of so many layers the last uses LSH attention, the others local attention; 1 means LSH in all",
]
LSHScoreScale = Annotated[float, "factor on LSH attention scores, which are products with keys of length 1"]


@recipe(
    "Reformer",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    cost=COST,
    reasons={
        "causal": "later tokens have zero weight, but they shift the chunk boundaries and so change which earlier "
        "tokens "
        "are attended to; `reformer-strict` is causal",
        "incremental_decoding": "a later token changes which earlier tokens are attended to, so no state can be cached",
        "cross_attention": SELF_ATTENTION_ONLY,
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
    chunk_length: ChunkLength = 64,
    num_hashes: HashCount = 4,
    lsh_every: LSHInterval = 1,
    ff_chunk: FeedForwardChunk = None,
    residual_streams: ResidualStreams = "reversible",
    scale: LSHScoreScale = 1.0,
    position: AddedPosition = "sinusoid",
    max_length: int = 1024,
    dropout: float = 0.0,
) -> LanguageModel:
    """The published algorithm as a language model: sections 2 and 3, pre-norm, with a tied output.

    In each group of `lsh_every` layers the last has LSH attention and the others attend to their block of
    `chunk_length` tokens and the previous one; 1 means LSH in all layers. `num_hashes` is not a weight and may change
    after training. The number of buckets does not depend on the length, as it does in the paper (2 l / chunk there).
    The two streams are averaged at the end, where the released code concatenates them. Scores, products with keys of
    length 1, are multiplied by `scale`: 1 as in the paper, 1 / sqrt(e) in a widespread package, e the width of a head.
    With a small scale vectors become similar before attention becomes sharp, which helps positions that must match each
    other. Positions are sinusoids, or learned ones up to `max_length`; those of the released models are learned and
    axial."""
    lsh = partial(
        LSHKernel,
        num_buckets=num_buckets,
        chunk_length=chunk_length,
        num_hashes=num_hashes,
        scale=scale,
        variant="published",
    )
    local_mask = Causal() & LocalBlocks(chunk_length, lookback=chunk_length)
    embed = embedding_with(position, vocab, dim, max_length, dropout=dropout)
    body = _body(dim, depth, heads, ff_dim, lsh, local_mask, lsh_every, ff_chunk, residual_streams, dropout)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "Reformer, strictly causal",
    paper=PAPER,
    summary="Chunks start with their bucket, so which tokens are attended to depends on the past alone.",
    task=LANGUAGE_MODELLING,
    causal=True,
    incremental_decoding=True,
    cost=f"{COST}; O(num_hashes l + l d) per generated token",
    reasons={"cross_attention": SELF_ATTENTION_ONLY},
    tiny_keywords=TINY,
)
def reformer_strict(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    num_buckets: BucketCount = 32,
    chunk_length: ChunkLength = 64,
    num_hashes: HashCount = 4,
    lsh_every: LSHInterval = 1,
    ff_chunk: FeedForwardChunk = None,
    residual_streams: ResidualStreams = "reversible",
    scale: LSHScoreScale = 1.0,
    position: AddedPosition = "sinusoid",
    max_length: int = 1024,
    dropout: float = 0.0,
) -> LanguageModel:
    """`reformer` whose buckets each start a new chunk, so that no later token shifts a chunk boundary.

    In every hash round a token attends to the earlier tokens of its bucket in its own chunk and the previous one:
    decoding token by token gives the same as one pass. Chunks are not all full, so fewer, larger buckets are better.
    """
    lsh = partial(
        LSHKernel,
        num_buckets=num_buckets,
        chunk_length=chunk_length,
        num_hashes=num_hashes,
        scale=scale,
        variant="strict",
    )
    local_mask = Causal() & LocalBlocks(chunk_length, lookback=chunk_length)
    embed = embedding_with(position, vocab, dim, max_length, dropout=dropout)
    body = _body(dim, depth, heads, ff_dim, lsh, local_mask, lsh_every, ff_chunk, residual_streams, dropout)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "Reformer encoder",
    paper=PAPER,
    summary=SUMMARY,
    task=MASKED_LM,
    cost=COST,
    reasons={
        "cross_attention": SELF_ATTENTION_ONLY,
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
    chunk_length: ChunkLength = 64,
    num_hashes: HashCount = 4,
    lsh_every: LSHInterval = 1,
    ff_chunk: FeedForwardChunk = None,
    residual_streams: ResidualStreams = "reversible",
    scale: LSHScoreScale = 1.0,
    position: AddedPosition = "sinusoid",
    max_length: int = 1024,
    dropout: float = 0.0,
) -> MaskedLM:
    """`reformer` that also attends to the next chunk, for masked tokens, with the head of `bert`."""
    lsh = partial(
        LSHKernel,
        num_buckets=num_buckets,
        chunk_length=chunk_length,
        num_hashes=num_hashes,
        scale=scale,
        chunks_after=1,
        variant="published",
    )
    local_mask = LocalBlocks(chunk_length, lookback=chunk_length, lookahead=chunk_length)
    embed = embedding_with(position, vocab, dim, max_length, dropout=dropout)
    body = _body(dim, depth, heads, ff_dim, lsh, local_mask, lsh_every, ff_chunk, residual_streams, dropout)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
    return MaskedLM(embed, body, ClassHead(dim, vocab, tied=embed.token, transform=transform, bias=True))


def _body(
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    lsh: Callable[[], LSHKernel],
    local_mask: Mask,
    lsh_every: int,
    ff_chunk: int | None,
    residual_streams: ResidualStreams,
    dropout: float,
) -> Chain:
    def layer_with(kernel: Kernel) -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, kernel, bias=False),
            "ff": chunked(FeedForward(dim, ff_dim), ff_chunk),
        }

    body = stack(
        depth,
        pattern=[
            *[lambda number: layer_with(SoftmaxKernel(local_mask))] * (lsh_every - 1),
            lambda number: layer_with(lsh()),
        ],
        order="pre",
        norm=partial(nn.LayerNorm, dim),
        dropout=dropout,
        streams=residual_streams,
    )
    scale_residual_init(body, depth, std=init_std(dim))
    return body
