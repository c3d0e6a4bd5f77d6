"""Texts about recipes that the command line and the documentation share: contracts, keywords, years, types."""

import re
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from manyformer.recipes.registry import Recipe, RecipeCard

CONTRACT_MEANINGS = {
    "causal": "no output depends on a later token",
    "incremental_decoding": "decoding from a cached state gives the same outputs as one pass",
    "cross_attention": "it attends to a second sequence",
    "padding_invariant": "padding and packing do not change the outputs",
}

COMMON_KEYWORDS = {
    "vocab": "number of token ids; the data decides it in a run",
    "source_vocab": "number of source token ids; null means one vocabulary for source and target",
    "classes": "number of labels; the data decides it in a run",
    "dim": "width of the residual stream",
    "depth": "number of layers (on each side of an encoder-decoder), or the maximum number of steps of a repeated "
    "layer",
    "halting": "adaptive computation time as in the paper (act) or in its released code (act-released), or a fixed "
    "number of "
    "steps",
    "ponder_cost": "weight in the loss of the mean number of steps",
    "transition": "what follows attention in each step: a feed-forward layer, or two depthwise-separable convolutions",
    "step_signal": "encoding of the step's number: sines and cosines, learned, or none",
    "halting_bias": "initial bias of the halting logit: 1 means two steps at first, -3 about twenty",
    "heads": "number of attention heads",
    "kv_heads": "number of key and value heads, each shared by a group of query heads; null means as many as heads",
    "ff_dim": "width of the hidden layer of feed-forward layers; null means the paper's multiple of dim",
    "gelu_approximate": "the exact GELU (none), or its tanh approximation, which some published weights were trained "
    "with",
    "max_length": "longest sequence that learned positions allow; a run takes it from the data unless given",
    "features": "number of random features for each head: more features approximate softmax better",
    "feature_kernel": "the kernel function that random features approximate",
    "projected_length": "number of projected keys that replace all keys, in the lowest layer",
    "top_projected_length": "number of projected keys in the topmost layer, interpolated in between; null means the "
    "same",
    "projection": "how keys are projected along the sequence: learned weights, mean or max pooling, or a convolution",
    "projection_sharing": "what shares a projection: nothing, all heads, also keys and values, or also all layers",
    "redraw": "training steps after which random features are drawn again; null means never",
    "directions": "random directions that are orthogonal in blocks, or independent",
    "update_rule": "how a token updates the recurrent memory: summed (sum), decayed and summed (gated), or the delta "
    "rule",
    "max_relative_distance": "relative distances are clipped to this many tokens",
    "tables": "relative position tables for each head, or one for all heads of a layer",
    "window": "number of positions in the attention window: on each side in an encoder, up to the token itself in a "
    "language "
    "model",
    "top_window": "window of the topmost layer, interpolated from the lowest; null means the same",
    "max_span": "maximum attention span of a head, in tokens",
    "span_ramp": "number of keys beyond a span over which attention decreases to zero",
    "span_init": "initial span, as a fraction of max_span",
    "span_loss": "weight in the loss of the mean span, in tokens",
    "span_kind": "one learned span for each head, a span computed for each token, or max_span for all",
    "dilated_heads": "number of heads with a dilated window, in the upper half of the layers",
    "global_tokens": "number of tokens at the start of a document that attend globally; null means only those that a "
    "call marks",
    "part_length": "number of tokens that one summary stands for, where a call does not divide the text into parts",
    "summaries": "number of global summary tokens before each document",
    "summary_reads": "what a summary attends to in the text: all of it, or its own part",
    "projections": "whether summaries and text share projections, or each of the four attention pieces has its own",
    "contrast_weight": "weight in the loss of contrastive prediction of masked parts; null means none",
    "stride": "length of a block, or distance between attended earlier positions",
    "summary": "number of positions at the end of each block that later blocks attend to",
    "pattern": "later tokens attend to the last positions of each block (fixed), or to every stride-th position "
    "(strided)",
    "pattern_use": "both position sets in every head (merged), alternating by layer (interleaved), or alternating by "
    "head",
    "random": "number of random blocks that each block attends to",
    "block": "number of positions in a block",
    "memory_block": "number of positions before its block that a token also attends to; null means none",
    "block_height": "height of the blocks in which images are generated; the data decides it in a run",
    "block_width": "width of the blocks in which images are generated; the data decides it in a run",
    "memory_height": "number of rows above its block that a pixel attends to; null means none",
    "memory_width": "number of columns beside its block that a pixel attends to: on both sides above it, and on the "
    "left; null "
    "means none",
    "logistic_mixtures": "number of logistic distributions in the output mixture; null means a class for each level",
    "blocks": "number of blocks that a sequence is divided into",
    "attention_layers": "number of topmost layers with attention; null means none",
    "weights": "one weight for each pair of positions (table), or one for each distance (shifts)",
    "attention_dim": "width of the small attention added to the gate; null means none",
    "shared_dim": "number of query and key dimensions shared by all heads; null means a quarter of dim",
    "score_kind": "source of the attention scores: the query (dense), positions alone (random), query and key (dot), "
    "or a mix",
    "qk_similarity": "score of a query and a key: cosine similarity with a learned scale, or the scaled dot product",
    "height": "height of images; the data decides it in a run",
    "width": "width of images; the data decides it in a run",
    "channels": "1 for grayscale images, 3 for color; the data decides it in a run",
    "patch": "height and width of a patch",
    "position": "kind of position encoding",
    "kernel": "attention kernel",
    "feedforward": "kind of feed-forward layer and activation",
    "norm_kind": "LayerNorm or RMSNorm",
    "scale": "factor on LSH attention scores, which are products with keys of length 1",
    "absolute": "positions added to embeddings: none, token order (sequential), or order and tree depth (fused)",
    "relative": "positions in attention: none, token order (sequential), the dependency tree (structural), or both "
    "(fused)",
    "positions": "patch positions: learned, learned for rows and columns (axes), or none",
    "pool": "representation of the whole image: a class token at the start, or the mean over patches",
    "token_mlp_dim": "width of the hidden layer that mixes patches; null means half of dim",
    "mixer": "the layer that mixes patches: a kind of attention, or a layer without attention",
    "num_buckets": "number of hash buckets in each hash round; 1 or even",
    "chunk_length": "number of sorted tokens in a chunk, which attends to itself and the chunk before",
    "num_hashes": "number of hash rounds, each with other random rotations; may change after training",
    "lsh_every": "in each group of so many layers the last uses LSH attention, the others local attention; 1 means LSH "
    "in all",
    "ff_chunk": "number of tokens that a feed-forward layer computes at a time, to save memory; null means all",
    "residual_streams": "one residual stream (plain), or two reversible ones, for which no activations are stored",
    "embedding_dim": "width of token embeddings",
    "align_dim": "width of the hidden layer that computes alignment scores",
    "maxout": "number of maxout units before the output projection",
    "clusters": "number of clusters of keys",
    "cluster_size": "number of tokens in a cluster, or in a chunk of one; null means an even share of a document",
    "local_heads": "number of heads of a routing layer with local attention; null means none, or half where the recipe "
    "says so",
    "routing_layers": "number of topmost layers with routing attention, above local layers; null means all",
    "centroid_decay": "decay of the exponential moving average of the centroids, for each step",
    "commitment": "weight in the loss of the distance of keys to their centroids",
    "temperature": "divides the block scores: the lower, the closer the sorting matrix is to a permutation",
    "sinkhorn_iterations": "number of Sinkhorn normalizations of rows and columns; null means that only rows sum to "
    "one",
    "gumbel_noise": "scale of the Gumbel noise added to block scores in training",
    "sortcut_blocks": "number of sorted blocks that all tokens attend to (SortCut); null means one sorted block for "
    "each block",
    "sorting": "how blocks are scored: by a learned network, or by products of block summaries",
    "mix_with": "attention added to the sorted one, with the same queries, keys and values",
    "dropout": "dropout probability",
    "length_scale": "factor by which scaled rotary positions exceed max_length; other positions ignore it",
    "memory_length": "number of earlier tokens whose states a layer caches as memory; null means no memory",
    "knn_memory_size": "number of key-value pairs in the kNN memory, for each row and head; null means none",
    "neighbours": "number of pairs that each query retrieves from the kNN memory",
    "layer": "the layer with the kNN memory, counted from 1; null means three quarters up",
    "combine": "how local and retrieved attention are combined: a learned gate for each head, or one joint softmax",
    "gate": "initial weight of retrieved attention, between 0 and 1",
    "search": "exact search over all keys of the kNN memory, or an approximate faiss index",
    "context": "attention to the whole memory and segment (growing), or to memory_length tokens for every token "
    "(same-length)",
    "clamp_length": "relative distances are clamped to this many tokens; null means not clamped",
    "bias_sharing": "one pair of content and position biases for all layers, or one for each layer",
    "compressed_length": "number of compressed memory slots of a layer",
    "rate": "number of tokens compressed into one slot",
    "compression": "function that compresses evicted memories",
    "teacher": "training loss of a learned compression; usual means attention reconstruction where the compression has "
    "weights",
    "base_recipe": "recipe of the model that early exit is added to",
    "base_keywords": "keywords of the base recipe, except those that the data may decide",
    "rule": "exit rule: a measure of confidence, or a small classifier that predicts the exit layer",
    "predictor": "how the exit layer is predicted; none trains the classifiers alone",
    "confidence": "what the threshold applies to: a margin of probabilities, the similarity of successive hidden "
    "states, or a "
    "trained unit",
    "threshold": "confidence at which a token exits, above 1 never; a list has one value for each layer but the last",
    "threshold_decay": "rate at which the threshold decays along the horizon; null means constant",
    "layer_weights": "equal weights of all layers in the loss, or weights that rise with the layer",
    "horizon": "longest output, along which a decaying threshold decreases",
    "classifier_sharing": "one output classifier shared by all layers, or one for each layer",
    "exit_training": "every layer is trained on every token (aligned), or on randomly sampled exits (mixed)",
    "mixed_samples": "number of random exit sequences of a mixed training, for each batch",
    "oracle": "how target exits are chosen: by the likelihood of the target, or by whether the prediction is correct",
    "smoothing": "width of the kernel that smooths an oracle's scores over neighbouring tokens; 0 means none",
    "layer_penalty": "penalty of an oracle for each layer",
    "exit_weight": "weight in the loss of exit prediction",
    "norm_order": "normalization after each residual sum (post), before each branch (pre), or before and after it "
    "(sandwich)",
}
"""Meanings of the recipes' keywords: each keyword has one spelling and one meaning in all recipes."""


def promised_contracts(card: RecipeCard) -> list[str]:
    """The names of the contracts that the card promises."""
    return [name for name in CONTRACT_MEANINGS if getattr(card, name)]


def publication_year(card: RecipeCard) -> int | None:
    """The year of the first paper that the card names."""
    match = re.search(r"\b(19|20)\d\d\b", card.paper)
    return int(match[0]) if match else None


class KeywordDoc(NamedTuple):
    """One keyword of a recipe: its type as text, its default, and its meaning in COMMON_KEYWORDS (or empty)."""

    name: str
    type: str
    default: Any
    meaning: str


def keyword_docs(recipe: Recipe) -> list[KeywordDoc]:
    """The keywords of a recipe, in the order of its signature."""
    return [
        KeywordDoc(
            parameter.name, type_text(parameter.annotation), parameter.default, COMMON_KEYWORDS.get(parameter.name, "")
        )
        for parameter in recipe.signature.parameters.values()
    ]


def type_text(annotation: Any) -> str:
    """A type annotation as text: `int or null`, `pre, post or sandwich`."""
    if get_origin(annotation) is Literal:
        return _join_alternatives([str(value) for value in get_args(annotation)])
    if get_origin(annotation) in (Union, UnionType):
        return _join_alternatives([type_text(part) for part in get_args(annotation)])
    if annotation is type(None):
        return "null"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _join_alternatives(alternatives: list[str]) -> str:
    return alternatives[0] if len(alternatives) == 1 else f"{', '.join(alternatives[:-1])} or {alternatives[-1]}"
