"""The Reformer: attention to similar tokens alone, found by hashing, in layers that keep no activations."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer
from manyformer.feedforward import FeedForward, in_pieces
from manyformer.kernels import LSH, Softmax
from manyformer.masks import Blocks, Causal, Mask
from manyformer.models import Head, LanguageModel, MaskedLM
from manyformer.recipes.alike import Added, added
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import Streams, shrink_outputs, small_std, stack

PAPER = "Kitaev et al. 2020, Reformer: The Efficient Transformer, arXiv:2001.04451"
NEW = (
    "Hashing finds the keys that a query would attend to; two streams make every layer's input follow from its output."
)
COST = "O(rounds l (chunk + buckets) d + l d^2) per layer; memory for activations does not grow with depth"
SMALL = {"buckets": 2, "chunk": 8, "rounds": 4, "position": "learned"}
READS_ONE = "queries are keys, so both are of one sequence; the paper's translation model attends across in full"


@recipe(
    "Reformer",
    paper=PAPER,
    new=NEW,
    task="language-model",
    cost=COST,
    because={
        "causal": "weights are zero for later tokens, but these move the borders of chunks, and so which earlier "
        "tokens are seen; `reformer-strict` is the causal one",
        "streams": "a later token changes which earlier tokens are seen, so nothing can be kept",
        "cross": READS_ONE,
    },
    small=SMALL,
)
def reformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    buckets: int = 64,
    chunk: int = 64,
    rounds: int = 4,
    every: int = 1,
    ff_chunk: int | None = None,
    residual: Streams = "reversible",
    scale: float = 1.0,
    position: Added = "sinusoid",
    longest: int = 1024,
    dropout: float = 0.0,
) -> LanguageModel:
    """The published algorithm as a language model: sections 2 and 3, pre-norm, with a tied output.

    Of `every` layers the last one hashes and the others look at their own block of `chunk` tokens and the one before;
    1 means that all hash. `rounds` is no weight: a trained model may be given more of them or fewer. The number of
    buckets does not depend on the length, as it does in the paper (2 l / chunk there). The streams are averaged in the
    end, where the released code lays them side by side. Scores, products with keys of length 1, are multiplied by
    `scale`: 1 as in the paper, 1 / sqrt(e) in a widespread package. A small one lets vectors become alike before
    attention is sharp, which positions that must find each other need. Positions are sinusoids, or learned ones up to
    `longest`; the released models' are learned and axial.
    """
    lsh = partial(LSH, buckets=buckets, chunk=chunk, rounds=rounds, scale=scale, form="published")
    near = Causal() & Blocks(chunk, before=chunk)
    embed = added(position, vocab, dim, longest, dropout=dropout)
    body = _body(dim, depth, heads, hidden, _kernels(lsh, near, every), ff_chunk, residual, dropout)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))


@recipe(
    "Reformer, strictly causal",
    paper=PAPER,
    new="Chunks that begin with their bucket: which tokens are seen depends on the past alone.",
    task="language-model",
    causal=True,
    streams=True,
    cost=f"{COST}; O(rounds l + l d) per written token",
    because={"cross": READS_ONE},
    small=SMALL,
)
def reformer_strict(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    buckets: int = 32,
    chunk: int = 64,
    rounds: int = 4,
    every: int = 1,
    ff_chunk: int | None = None,
    residual: Streams = "reversible",
    scale: float = 1.0,
    position: Added = "sinusoid",
    longest: int = 1024,
    dropout: float = 0.0,
) -> LanguageModel:
    """`reformer` with a chunk of its own for each bucket's first tokens, so that no later token moves a border.

    In every round a token attends to the earlier tokens of its bucket in its own chunk and the one before: writing
    token by token gives what one pass gives. Chunks are not all full, so that fewer, larger buckets are better.
    """
    lsh = partial(LSH, buckets=buckets, chunk=chunk, rounds=rounds, scale=scale, form="strict")
    near = Causal() & Blocks(chunk, before=chunk)
    embed = added(position, vocab, dim, longest, dropout=dropout)
    body = _body(dim, depth, heads, hidden, _kernels(lsh, near, every), ff_chunk, residual, dropout)
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))


@recipe(
    "Reformer encoder",
    paper=PAPER,
    new=NEW,
    task="masked",
    cost=COST,
    because={
        "causal": "every token sees both sides",
        "streams": "a later token changes all earlier outputs, so nothing can be kept",
        "cross": READS_ONE,
    },
    small=SMALL,
)
def reformer_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    buckets: int = 64,
    chunk: int = 64,
    rounds: int = 4,
    every: int = 1,
    ff_chunk: int | None = None,
    residual: Streams = "reversible",
    scale: float = 1.0,
    position: Added = "sinusoid",
    longest: int = 1024,
    dropout: float = 0.0,
) -> MaskedLM:
    """`reformer` that also looks one chunk ahead, for masked tokens, with the head of `bert`."""
    lsh = partial(LSH, buckets=buckets, chunk=chunk, rounds=rounds, scale=scale, after=1, form="published")
    near = Blocks(chunk, before=chunk, after=chunk)
    embed = added(position, vocab, dim, longest, dropout=dropout)
    body = _body(dim, depth, heads, hidden, _kernels(lsh, near, every), ff_chunk, residual, dropout)
    transform = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim))
    return MaskedLM(embed, body, Head(dim, vocab, tied=embed.token, transform=transform, bias=True))


def _kernels(lsh: Callable[[], LSH], near: Mask, every: int) -> Iterator[LSH | Softmax]:
    """The kernels of the layers from the lowest on."""
    return (Softmax(near) if number % every else lsh() for number in count(1))


def _body(
    dim: int,
    depth: int,
    heads: int,
    hidden: int | None,
    kernels: Iterator[LSH | Softmax],
    ff_chunk: int | None,
    residual: Streams,
    dropout: float,
) -> Chain:
    def layer() -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, next(kernels), bias=False),
            "ff": in_pieces(FeedForward(dim, hidden), ff_chunk),
        }

    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout, streams=residual)
    shrink_outputs(body, depth, std=small_std(dim))
    return body
