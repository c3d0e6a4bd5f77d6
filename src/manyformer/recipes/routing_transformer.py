"""The Routing Transformer: each token attends among those of its cluster, as published and without a look ahead."""

from functools import partial
from typing import NamedTuple

from torch import nn

from manyformer.attention import Attention
from manyformer.core import Chain, Layer, Pointwise
from manyformer.errors import UserError
from manyformer.feedforward import FeedForward
from manyformer.kernels import RoutingKernel, SoftmaxKernel
from manyformer.kernels.centroids import KMeansCentroids
from manyformer.kernels.routing_kernel import BalancedMembership, ClusterMembership, NearestMembership
from manyformer.masks import Window
from manyformer.mixers import ParallelLayers
from manyformer.models import ClassHead, LanguageModel, TokenEmbedding
from manyformer.position import RotaryPosition
from manyformer.recipes.baselines import AddedPosition, embedding_with
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, branch, init_std, scale_residual_init

PAPER = "Roy et al. 2021, Efficient Content-Based Sparse Attention with Routing Transformers, arXiv:2003.05997"
SMALL = {"clusters": 3, "window": 5, "local_heads": 1}


class RoutingSizes(NamedTuple):
    """What the attention of a layer is made of: of its heads, `local_heads` ones see a `window` and the others route."""

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
    summary="Keys are clustered while training, and a token attends within its cluster: content decides what is seen.",
    task="language-model",
    cost="O(l^2 d / clusters + l clusters d + l d^2) per layer; l sqrt(l) with sqrt(l) clusters",
    reasons={
        "causal": "a cluster takes its nearest tokens, and a later one may drive out an earlier one",
        "incremental_decoding": "later tokens change who is in a cluster; routing-transformer-strict can go on from a state",
        "cross_attention": "a language model reads one sequence only",
    },
    tiny_keywords=SMALL,
)
def routing_transformer(
    vocab: int = 256,
    dim: int = 1024,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    clusters: int = 16,
    cluster_size: int | None = None,
    window: int = 256,
    local_heads: int | None = None,
    routing_layers: int | None = None,
    centroid_decay: float = 0.999,
    commitment: float = 1e-4,
    position: AddedPosition = "sinusoid",
    max_length: int = 1024,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """As published, sections 4 and 5, with the sizes for enwik8: gradients never run from the future to the past.

    Of the heads `local_heads`, half of them unless given, see a window with rotary positions, where the paper has
    blocks with relative ones; sinusoids tell the others of positions, or learned ones up to `max_length`. Scores are
    divided by sqrt(e), and a token's own key counts only where it has no other: in the released code, where queries are
    keys, it outweighs all others. Whoever trains it by other means than `manyformer.train` calls
    `manyformer.training_hooks.renew` after each step, or the centroids stay."""
    sizes = RoutingSizes(
        dim, heads, heads // 2 if local_heads is None else local_heads, window, clusters, centroid_decay, commitment
    )
    embed = embedding_with(position, vocab, dim, max_length, dropout=dropout)
    return _model(
        embed,
        depth,
        ff_dim,
        sizes,
        BalancedMembership(cluster_size),
        routing_layers,
        dropout=dropout,
        norm_order=norm_order,
    )


@recipe(
    "Routing Transformer, strictly causal",
    paper=PAPER,
    summary="The cluster of a token follows from the token alone, so that no later one changes what it sees.",
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="O(l (members + window + clusters) d + l d^2) per layer",
    reasons={
        "cross_attention": "a language model reads one sequence only",
        "bfloat16": "a token that is about as near to two clusters joins another one where numbers are rounded",
    },
    tiny_keywords=SMALL | {"cluster_size": 4},
)
def routing_transformer_strict(
    vocab: int = 256,
    dim: int = 1024,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    clusters: int = 16,
    cluster_size: int = 256,
    window: int = 256,
    local_heads: int | None = None,
    routing_layers: int | None = None,
    centroid_decay: float = 0.999,
    commitment: float = 1e-4,
    position: AddedPosition = "sinusoid",
    max_length: int = 1024,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """`routing-transformer` in which a token is in the cluster of its nearest centroid alone.

    Of the earlier members it sees those in its chunk of `cluster_size` of them, and in the one before. The published
    clusters are all of one size, and change with the future; these can be of any size. Written token by token or read
    at once, it gives the same.
    """
    sizes = RoutingSizes(
        dim, heads, heads // 2 if local_heads is None else local_heads, window, clusters, centroid_decay, commitment
    )
    embed = embedding_with(position, vocab, dim, max_length, dropout=dropout)
    return _model(
        embed,
        depth,
        ff_dim,
        sizes,
        NearestMembership(cluster_size),
        routing_layers,
        dropout=dropout,
        norm_order=norm_order,
    )


def _model(
    embed: TokenEmbedding,
    depth: int,
    ff_dim: int | None,
    sizes: RoutingSizes,
    membership: ClusterMembership,
    routed: int | None,
    *,
    dropout: float,
    norm_order: NormOrder,
) -> LanguageModel:
    if sizes.local >= sizes.heads:
        raise UserError(f"local ({sizes.local}) heads must be fewer than heads ({sizes.heads}): nobody would route")
    if routed is not None and routed > depth:
        raise UserError(f"routed ({routed}) layers are more than there are layers ({depth})")
    if sizes.dim % sizes.heads:
        raise UserError(f"dim ({sizes.dim}) must be a multiple of heads ({sizes.heads})")
    rotary, first = RotaryPosition(sizes.dim // sizes.heads), 0 if routed is None else depth - routed
    layer_norm = partial(nn.LayerNorm, sizes.dim)

    def layer(number: int) -> Layer:
        parts: dict[str, Layer] = {
            "attention": _routing(sizes, membership, rotary) if number >= first else _local(sizes, sizes.heads, rotary),
            "ff": FeedForward(sizes.dim, ff_dim, activation=nn.GELU()),
        }
        return Chain(
            **{name: branch(part, order=norm_order, norm=layer_norm, dropout=dropout) for name, part in parts.items()}
        )

    layers = {str(number): layer(number) for number in range(depth)}
    body = Chain(**layers) if norm_order == "post" else Chain(**layers, norm=Pointwise(layer_norm()))
    scale_residual_init(body, depth, std=init_std(sizes.dim))
    return LanguageModel(embed, body, ClassHead(*embed.token.weight.shape[::-1], tied=embed.token))


def _local(sizes: RoutingSizes, heads: int, rotary: RotaryPosition) -> Attention:
    """Heads with a window."""
    width = sizes.dim // sizes.heads
    return Attention(
        sizes.dim, heads, SoftmaxKernel(Window(sizes.window)), head_dim=width, value_dim=width, position=rotary
    )


def _routing(sizes: RoutingSizes, membership: ClusterMembership, rotary: RotaryPosition) -> Layer:
    """Heads that route, beside local ones where there are any."""
    width, heads = sizes.dim // sizes.heads, sizes.heads - sizes.local
    centroids = KMeansCentroids(heads, sizes.clusters, width, decay=sizes.decay, commitment=sizes.commitment)
    routing = Attention(sizes.dim, heads, RoutingKernel(centroids, membership), head_dim=width, value_dim=width)
    return ParallelLayers(local=_local(sizes, sizes.local, rotary), routing=routing) if sizes.local else routing
