"""The Routing Transformer: each token attends among those of its cluster, as published and without a look ahead."""

from functools import partial
from typing import NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer, Pointwise
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward
from manyformer.kernels import Routing, Softmax
from manyformer.kernels.centroids import Centroids
from manyformer.kernels.routing import Balanced, Membership, Nearest
from manyformer.masks import Window
from manyformer.mixers import Beside
from manyformer.models import Embedding, Head, LanguageModel
from manyformer.position import Rotary
from manyformer.recipes.alike import Added, added
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, branch, shrink_outputs, small_std

PAPER = "Roy et al. 2021, Efficient Content-Based Sparse Attention with Routing Transformers, arXiv:2003.05997"
SMALL = {"clusters": 3, "window": 5, "local": 1}


class Sizes(NamedTuple):
    """What the attention of a layer is made of: of its heads, `local` ones see a `window` and the others route."""

    dim: int
    heads: int
    local: int
    window: int
    clusters: int
    decay: float
    commitment: float


@recipe(
    "Routing Transformer",
    paper=PAPER,
    new="Keys are clustered while training, and a token attends within its cluster: content decides what is seen.",
    task="language-model",
    cost="O(l^2 d / clusters + l clusters d + l d^2) per layer; l sqrt(l) with sqrt(l) clusters",
    because={
        "causal": "a cluster takes its nearest tokens, and a later one may drive out an earlier one",
        "streams": "later tokens change who is in a cluster; routing-transformer-strict can go on from a state",
        "cross": "a language model reads one sequence only",
    },
    small=SMALL,
)
def routing_transformer(
    vocab: int = 256,
    dim: int = 1024,
    depth: int = 12,
    heads: int = 8,
    hidden: int | None = None,
    clusters: int = 16,
    members: int | None = None,
    window: int = 256,
    local: int | None = None,
    routed: int | None = None,
    decay: float = 0.999,
    commitment: float = 1e-4,
    position: Added = "sinusoid",
    longest: int = 1024,
    dropout: float = 0.0,
    norm: NormOrder = "pre",
) -> LanguageModel:
    """As published, sections 4 and 5, with the sizes for enwik8: gradients never run from the future to the past.

    Of the heads `local`, half of them unless given, see a window with rotary positions, where the paper has blocks with
    relative ones; sinusoids tell the others of positions, or learned ones up to `longest`. Scores are divided by
    sqrt(e), and a token's own key counts only where it has no other: in the released code, where queries are keys, it
    outweighs all others. Whoever trains it by other means than `manyformer.train` calls `manyformer.hooks.renew` after
    each step, or the centroids stay.
    """
    sizes = Sizes(dim, heads, heads // 2 if local is None else local, window, clusters, decay, commitment)
    embed = added(position, vocab, dim, longest, dropout=dropout)
    return _model(embed, depth, hidden, sizes, Balanced(members), routed, dropout=dropout, norm=norm)


@recipe(
    "Routing Transformer, strictly causal",
    paper=PAPER,
    new="The cluster of a token follows from the token alone, so that no later one changes what it sees.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l (members + window + clusters) d + l d^2) per layer",
    because={
        "cross": "a language model reads one sequence only",
        "bfloat16": "a token that is about as near to two clusters joins another one where numbers are rounded",
    },
    small=SMALL | {"members": 4},
)
def routing_transformer_strict(
    vocab: int = 256,
    dim: int = 1024,
    depth: int = 12,
    heads: int = 8,
    hidden: int | None = None,
    clusters: int = 16,
    members: int = 256,
    window: int = 256,
    local: int | None = None,
    routed: int | None = None,
    decay: float = 0.999,
    commitment: float = 1e-4,
    position: Added = "sinusoid",
    longest: int = 1024,
    dropout: float = 0.0,
    norm: NormOrder = "pre",
) -> LanguageModel:
    """`routing-transformer` in which a token is in the cluster of its nearest centroid alone.

    Of the earlier members it sees those in its chunk of `members` of them, and in the one before. The published
    clusters are all of one size, and change with the future; these can be of any size. Written token by token or read
    at once, it gives the same.
    """
    sizes = Sizes(dim, heads, heads // 2 if local is None else local, window, clusters, decay, commitment)
    embed = added(position, vocab, dim, longest, dropout=dropout)
    return _model(embed, depth, hidden, sizes, Nearest(members), routed, dropout=dropout, norm=norm)


def _model(
    embed: Embedding,
    depth: int,
    hidden: int | None,
    sizes: Sizes,
    membership: Membership,
    routed: int | None,
    *,
    dropout: float,
    norm: NormOrder,
) -> LanguageModel:
    if sizes.local >= sizes.heads:
        raise UserError(f"local ({sizes.local}) heads must be fewer than heads ({sizes.heads}): nobody would route")
    if routed is not None and routed > depth:
        raise UserError(f"routed ({routed}) layers are more than there are layers ({depth})")
    if sizes.dim % sizes.heads:
        raise UserError(f"dim ({sizes.dim}) must be a multiple of heads ({sizes.heads})")
    rotary, first = Rotary(sizes.dim // sizes.heads), 0 if routed is None else depth - routed
    layer_norm = partial(nn.LayerNorm, sizes.dim)

    def layer(number: int) -> Layer:
        parts: dict[str, Layer] = {
            "attention": _routing(sizes, membership, rotary) if number >= first else _local(sizes, sizes.heads, rotary),
            "ff": FeedForward(sizes.dim, hidden, activation=nn.GELU()),
        }
        return Chain(
            **{name: branch(part, order=norm, norm=layer_norm, dropout=dropout) for name, part in parts.items()}
        )

    layers = {str(number): layer(number) for number in range(depth)}
    body = Chain(**layers) if norm == "post" else Chain(**layers, norm=Pointwise(layer_norm()))
    shrink_outputs(body, depth, std=small_std(sizes.dim))
    return LanguageModel(embed, body, Head(*embed.token.weight.shape[::-1], tied=embed.token))


def _local(sizes: Sizes, heads: int, rotary: Rotary) -> Attention:
    """Heads with a window."""
    width = sizes.dim // sizes.heads
    return Attention(sizes.dim, heads, Softmax(Window(sizes.window)), key=width, value=width, position=rotary)


def _routing(sizes: Sizes, membership: Membership, rotary: Rotary) -> Layer:
    """Heads that route, beside local ones where there are any."""
    width, heads = sizes.dim // sizes.heads, sizes.heads - sizes.local
    centroids = Centroids(heads, sizes.clusters, width, decay=sizes.decay, commitment=sizes.commitment)
    routing = Attention(sizes.dim, heads, Routing(centroids, membership), key=width, value=width)
    return Beside(local=_local(sizes, sizes.local, rotary), routing=routing) if sizes.local else routing
