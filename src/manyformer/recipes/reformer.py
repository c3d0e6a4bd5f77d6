"""The Reformer: attention to similar tokens alone, found by hashing, in layers that keep no activations."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer
from manyformer.feedforward import FeedForward, chunked
from manyformer.kernels import LSHKernel, SoftmaxKernel
from manyformer.masks import Causal, LocalBlocks, Mask
from manyformer.models import ClassHead, LanguageModel, MaskedLM
from manyformer.recipes.baselines import AddedPosition, embedding_with
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import ResidualStreams, init_std, scale_residual_init, stack

PAPER = "Kitaev et al. 2020, Reformer: The Efficient Transformer, arXiv:2001.04451"
NEW = (
    "Hashing finds the keys that a query would attend to; two streams make every layer's input follow from its output."
)
COST = "O(rounds l (chunk + buckets) d + l d^2) per layer; memory for activations does not grow with depth"
SMALL = {"num_buckets": 2, "chunk_length": 8, "num_hashes": 4, "position": "learned"}
READS_ONE = "queries are keys, so both are of one sequence; the paper's translation model attends across in full"


@recipe(
    "Reformer",
    paper=PAPER,
    summary=NEW,
    task="language-model",
    cost=COST,
    reasons={
        "causal": "weights are zero for later tokens, but these move the borders of chunks, and so which earlier "
        "tokens are seen; `reformer-strict` is the causal one",
        "incremental_decoding": "a later token changes which earlier tokens are seen, so nothing can be kept",
        "cross_attention": READS_ONE,
    },
    tiny_keywords=SMALL,
)
def reformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    num_buckets: int = 64,
    chunk_length: int = 64,
    num_hashes: int = 4,
    lsh_every: int = 1,
    ff_chunk: int | None = None,
    residual_streams: ResidualStreams = "reversible",
    scale: float = 1.0,
    position: AddedPosition = "sinusoid",
    max_length: int = 1024,
    dropout: float = 0.0,
) -> LanguageModel:
    """The published algorithm as a language model: sections 2 and 3, pre-norm, with a tied output.

    Of `lsh_every` layers the last one hashes and the others look at their own block of `chunk_length` tokens and the
    one before; 1 means that all hash. `num_hashes` is no weight: a trained model may be given more of them or fewer.
    The number of buckets does not depend on the length, as it does in the paper (2 l / chunk there). The streams are
    averaged in the end, where the released code lays them side by side. Scores, products with keys of length 1, are
    multiplied by `scale`: 1 as in the paper, 1 / sqrt(e) in a widespread package. A small one lets vectors become alike
    before attention is sharp, which positions that must find each other need. Positions are sinusoids, or learned ones
    up to `max_length`; the released models' are learned and axial."""
    lsh = partial(LSHKernel, buckets=num_buckets, chunk=chunk_length, rounds=num_hashes, scale=scale, form="published")
    near = Causal() & LocalBlocks(chunk_length, lookback=chunk_length)
    embed = embedding_with(position, vocab, dim, max_length, dropout=dropout)
    body = _body(dim, depth, heads, ff_dim, _kernels(lsh, near, lsh_every), ff_chunk, residual_streams, dropout)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "Reformer, strictly causal",
    paper=PAPER,
    summary="Chunks that begin with their bucket: which tokens are seen depends on the past alone.",
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost=f"{COST}; O(rounds l + l d) per written token",
    reasons={"cross_attention": READS_ONE},
    tiny_keywords=SMALL,
)
def reformer_strict(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    num_buckets: int = 32,
    chunk_length: int = 64,
    num_hashes: int = 4,
    lsh_every: int = 1,
    ff_chunk: int | None = None,
    residual_streams: ResidualStreams = "reversible",
    scale: float = 1.0,
    position: AddedPosition = "sinusoid",
    max_length: int = 1024,
    dropout: float = 0.0,
) -> LanguageModel:
    """`reformer` with a chunk of its own for each bucket's first tokens, so that no later token moves a border.

    In every round a token attends to the earlier tokens of its bucket in its own chunk and the one before: writing
    token by token gives what one pass gives. Chunks are not all full, so that fewer, larger buckets are better.
    """
    lsh = partial(LSHKernel, buckets=num_buckets, chunk=chunk_length, rounds=num_hashes, scale=scale, form="strict")
    near = Causal() & LocalBlocks(chunk_length, lookback=chunk_length)
    embed = embedding_with(position, vocab, dim, max_length, dropout=dropout)
    body = _body(dim, depth, heads, ff_dim, _kernels(lsh, near, lsh_every), ff_chunk, residual_streams, dropout)
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


@recipe(
    "Reformer encoder",
    paper=PAPER,
    summary=NEW,
    task="masked",
    cost=COST,
    reasons={
        "causal": "every token sees both sides",
        "incremental_decoding": "a later token changes all earlier outputs, so nothing can be kept",
        "cross_attention": READS_ONE,
    },
    tiny_keywords=SMALL,
)
def reformer_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    num_buckets: int = 64,
    chunk_length: int = 64,
    num_hashes: int = 4,
    lsh_every: int = 1,
    ff_chunk: int | None = None,
    residual_streams: ResidualStreams = "reversible",
    scale: float = 1.0,
    position: AddedPosition = "sinusoid",
    max_length: int = 1024,
    dropout: float = 0.0,
) -> MaskedLM:
    """`reformer` that also looks one chunk ahead, for masked tokens, with the head of `bert`."""
    lsh = partial(
        LSHKernel, buckets=num_buckets, chunk=chunk_length, rounds=num_hashes, scale=scale, after=1, form="published"
    )
    near = LocalBlocks(chunk_length, lookback=chunk_length, lookahead=chunk_length)
    embed = embedding_with(position, vocab, dim, max_length, dropout=dropout)
    body = _body(dim, depth, heads, ff_dim, _kernels(lsh, near, lsh_every), ff_chunk, residual_streams, dropout)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
    return MaskedLM(embed, body, ClassHead(dim, vocab, tied=embed.token, transform=transform, bias=True))


def _kernels(lsh: Callable[[], LSHKernel], near: Mask, every: int) -> Iterator[LSHKernel | SoftmaxKernel]:
    """The kernels of the layers from the lowest on."""
    return (SoftmaxKernel(near) if number % every else lsh() for number in count(1))


def _body(
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    kernels: Iterator[LSHKernel | SoftmaxKernel],
    ff_chunk: int | None,
    residual: ResidualStreams,
    dropout: float,
) -> Chain:
    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, next(kernels), bias=False),
            "ff": chunked(FeedForward(dim, ff_dim), ff_chunk),
        }

    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout, streams=residual)
    scale_residual_init(body, depth, std=init_std(dim))
    return body
