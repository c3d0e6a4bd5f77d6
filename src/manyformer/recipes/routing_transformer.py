"""The Routing Transformer: tokens attend within their cluster; as published, and in a strictly causal form."""

from typing import Annotated, TypedDict, Unpack

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.clustered.centroids import KMeansCentroids
from manyformer.nn.clustered.routing_kernel import (
    BalancedMembership,
    ClusterMembership,
    NearestMembership,
    RoutingKernel,
)
from manyformer.nn.core import Layer, ParallelLayers
from manyformer.nn.masks import Window
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import (
    AddedPosition,
    NormOrder,
    check_heads,
    embedding_with,
    gelu_layers,
    language_model,
)
from manyformer.recipes.parts.keywords import CausalWindowSize, Default, PositiveSize
from manyformer.recipes.parts.registry import recipe

PAPER = "Roy et al. 2021, Efficient Content-Based Sparse Attention with Routing Transformers, arXiv:2003.05997"
TINY = {"clusters": 3, "window": 5, "local_heads": 1}


class RoutingOptions(TypedDict, total=False):
    """The keywords that both forms of the Routing Transformer share."""

    clusters: Annotated[PositiveSize, "number of clusters of keys", Default(16)]
    window: Annotated[CausalWindowSize, Default(256)]
    local_heads: Annotated[
        PositiveSize | None, "number of heads of a routing layer with local attention; null means half", Default(None)
    ]
    routing_layers: Annotated[
        PositiveSize | None,
        "number of topmost layers with routing attention, above local layers; null means all",
        Default(None),
    ]
    centroid_decay: Annotated[
        float, "decay of the exponential moving average of the centroids, for each step", Default(0.999)
    ]
    commitment: Annotated[float, "weight in the loss of the distance of keys to their centroids", Default(1e-4)]
    position: Annotated[AddedPosition, Default("sinusoid")]
    max_length: Annotated[int, Default(1024)]
    dropout: Annotated[float, Default(0.0)]
    norm_order: Annotated[NormOrder, Default("pre")]


@recipe(
    "Routing Transformer",
    paper=PAPER,
    summary="Keys are clustered by online k-means, and a token attends within its cluster: sparsity based on content.",
    task=LANGUAGE_MODELLING,
    family="clustered",
    cost="O(l^2 d / clusters + l clusters d + l d^2) per layer; l sqrt(l) with sqrt(l) clusters",
    reasons={
        "causal": "a cluster takes its nearest tokens, and a later token can displace an earlier one",
        "incremental_decoding": "later tokens change the clusters; routing-transformer-strict decodes incrementally",
        "attention_dropout": "tokens of a cluster attend to each other in a kernel of its own",
        "convex_weights": "a query without a key in its cluster gets zeros",
    },
    tiny_keywords=TINY,
)
def routing_transformer(
    vocab: int = 256,
    dim: int = 1024,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    cluster_size: Annotated[
        PositiveSize | None, "number of tokens in a cluster; null means an even share of a document"
    ] = None,
    **options: Unpack[RoutingOptions],
) -> LanguageModel:
    """As published, sections 4 and 5, with the enwik8 sizes: attention never gives weight to later tokens.

    `local_heads` of the heads, half of them unless given, have a window with rotary positions, where the paper has
    blocks with relative ones; the others get positions from sinusoids, or from learned embeddings up to `max_length`.
    Scores are divided by sqrt(e), and a token attends to itself only if it can attend to no other: in the released
    code, where queries are keys, its own key outweighs all others. A training loop other than `manyformer.train` must
    call `manyformer.nn.runtime.training_hooks.run_post_step_updates` after each step to update the centroids."""
    return _model(vocab, dim, depth, heads, ff_dim, BalancedMembership(cluster_size), options)


@recipe(
    "Routing Transformer, strictly causal",
    paper=PAPER,
    summary="A token's cluster depends on the token alone, so later tokens do not change what it attends to.",
    task=LANGUAGE_MODELLING,
    family="clustered",
    cost="O(l (cluster_size + window + clusters) d + l d^2) per layer",
    reasons={
        "bfloat16": "rounding can move a token between two clusters of nearly equal distance",
        "attention_dropout": "tokens of a cluster attend to each other in a kernel of its own",
    },
    tiny_keywords=TINY | {"cluster_size": 4},
)
def routing_transformer_strict(
    vocab: int = 256,
    dim: int = 1024,
    depth: int = 12,
    heads: int = 8,
    ff_dim: int | None = None,
    cluster_size: Annotated[PositiveSize, "number of tokens in a chunk of a cluster"] = 256,
    **options: Unpack[RoutingOptions],
) -> LanguageModel:
    """`routing-transformer` in which a token belongs to the cluster of its nearest centroid alone.

    It attends to earlier tokens of the cluster in its own chunk of `cluster_size` tokens and the previous chunk. The
    published clusters all have one size, and depend on the future; these can have any size. Decoding token by token
    gives the same as one pass."""
    return _model(vocab, dim, depth, heads, ff_dim, NearestMembership(cluster_size), options)


def _model(
    vocab: int,
    dim: int,
    depth: int,
    heads: int,
    ff_dim: int | None,
    membership: ClusterMembership,
    options: RoutingOptions,
) -> LanguageModel:
    if options["local_heads"] is None:
        local_heads = heads // 2
    else:
        local_heads = options["local_heads"]
    if options["routing_layers"] is None:
        routing_layers = depth
    else:
        routing_layers = options["routing_layers"]
    if local_heads >= heads:
        raise UserError(f"local_heads ({local_heads}) must be fewer than heads ({heads}): no head would route")
    if routing_layers > depth:
        raise UserError(f"routing_layers ({routing_layers}) must be at most depth ({depth})")
    check_heads(dim, heads)
    head_dim = dim // heads
    # local heads alone: clusters compare content, and rotations would move it
    rotary = RotaryPosition(head_dim)

    def local_attention(local_heads: int) -> Layer:
        kernel = SoftmaxKernel(Window(options["window"]))
        return Attention(dim, local_heads, kernel, head_dim=head_dim, value_dim=head_dim, position=rotary)

    def routing_attention(routing_heads: int) -> Layer:
        decay = options["centroid_decay"]
        commitment = options["commitment"]
        centroids = KMeansCentroids(routing_heads, options["clusters"], head_dim, decay=decay, commitment=commitment)
        kernel = RoutingKernel(centroids, membership)
        return Attention(dim, routing_heads, kernel, head_dim=head_dim, value_dim=head_dim)

    def attention(number: int) -> Layer:
        if number < depth - routing_layers:
            # the topmost layers route; those below are local in all heads
            return local_attention(heads)
        routing = routing_attention(heads - local_heads)
        if local_heads:
            # two attentions of fewer heads side by side, whose outputs are summed: a concatenation of heads is that
            return ParallelLayers(local=local_attention(local_heads), routing=routing)
        return routing

    dropout = options["dropout"]
    embed = embedding_with(options["position"], vocab, dim, options["max_length"], dropout=dropout)
    layer = gelu_layers(dim, ff_dim, attention)
    return language_model(embed, depth, layer, dropout=dropout, norm_order=options["norm_order"])
