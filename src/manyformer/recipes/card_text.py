"""A recipe's card for readers: what lists, explanations and the documentation's table say alike."""

import re
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from manyformer.recipes.registry import Recipe, RecipeCard

PROMISES = {
    "causal": "no output depends on a later token",
    "incremental_decoding": "it goes on from a state, step by step as in one pass",
    "cross_attention": "it attends to a second sequence",
    "padding_invariant": "padding and packing leave results unchanged",
}

COMMON_KEYWORDS = {
    "vocab": "number of token ids; the data decides it in a run",
    "source_vocab": "number of the source's token ids where it has its own; null means one vocabulary for both sides",
    "classes": "number of labels; the data decides it in a run",
    "dim": "width of the residual stream",
    "depth": "number of layers (on either side of an encoder-decoder), or of the steps of one that is repeated",
    "halting": "by adaptive computation time as in the paper, as its released code has it, or after a fixed number",
    "ponder_cost": "what a step costs, as a share of the loss",
    "transition": "what follows attention in each step: a feed-forward layer, or two depth-separable convolutions",
    "step_signal": "of the step's number: sines and cosines, learned, or none",
    "halting_bias": "where the halting probability begins, before its sigmoid: 1 means two steps at first, -3 some twenty",
    "heads": "attention heads; they share the width",
    "kv_heads": "heads of keys and values, shared by groups of query heads; null means as many as heads",
    "ff_dim": "width inside the feed-forward layers; null means the usual multiple of dim",
    "gelu_approximate": "the activation exactly, or by its tanh approximation, which published weights may have been trained with",
    "max_length": "longest sequence that learned positions allow; a run takes it from the data unless given",
    "features": "random features for each head, of which nearer estimates need more",
    "slots": "mixtures that stand for all keys, in the lowest layer",
    "top_projected_length": "the same in the topmost layer, changing evenly between; null means as many",
    "projection": "how tokens become slots: by learned weights, as mean or largest of stretches, or by a convolution",
    "projection_sharing": "who has the same projection: nobody, all heads, also keys and values, also all layers",
    "redraw": "random features are drawn anew after so many training steps; null means never",
    "directions": "random directions orthogonal to each other in blocks, or independent",
    "memory": "how a causal memory takes in a token: by adding, by fading and adding, or by correcting what it says",
    "max_relative_distance": "distances beyond this many tokens are alike",
    "tables": "whether each head has relative positions of its own, or all heads of a layer the same",
    "window": "how many positions a token sees: on either side of an encoder's, up to itself in a language model",
    "top_window": "the window of the topmost layer, growing evenly from the lowest; null means the same",
    "max_span": "how far back a head may look at most",
    "span_ramp": "keys over which attention fades out beyond a span",
    "span_init": "where spans start from, as a share of the longest",
    "span_loss": "what a span costs, as a share of the loss for each token of its length",
    "span_kind": "whether each head learns one span, each token has its own, or all look back as far as they may",
    "dilated_heads": "heads that see every second position or fewer, in the upper half of the layers",
    "global_tokens": "first tokens of a document that see all and are seen by all; null means those that a call names alone",
    "part_length": "tokens that have a summary together, where nobody says what the parts of a text are",
    "summaries": "global tokens before each document, which belong to no text",
    "summary_reads": "what a summary sees of the text: all of it, or its own part",
    "projections": "whether summaries and text have the same projections, or each piece of attention its own",
    "contrast_weight": "share of the loss that tells hidden parts of a text apart by their summaries; null means none",
    "stride": "length of a block, or distance between the positions seen further back",
    "summary": "positions at the end of each block that later blocks see",
    "pattern": "whether blocks end in positions that all later ones see, or every so many-th position is seen",
    "pattern_use": "both sets in every head, one in each layer in turn, or one in each head in turn",
    "random": "random blocks that each block sees",
    "block": "positions in a block",
    "memory_block": "positions right before its block that a token sees, too; null means none",
    "block_height": "height of the blocks that images are written in; the data decides it in a run",
    "block_width": "width of the blocks that images are written in; the data decides it in a run",
    "memory_height": "rows above its block that a pixel sees; null means none",
    "memory_width": "columns beside its block that a pixel sees: on both sides above it, and on its left; null means none",
    "logistic_mixtures": "logistic distributions that levels are cut from; null means a class for each level",
    "blocks": "number of blocks that a sequence is cut into",
    "attention_layers": "topmost layers that attend, after layers that do not; null means none",
    "weights": "whether weights along the sequence belong to pairs of positions or to distances",
    "attention_dim": "width of a small attention beside the gate; null means there is none",
    "shared_dim": "dimensions of queries and keys that all heads share; null means a quarter of dim",
    "scores": "where attention weights come from: the query, the positions alone, query and key, or mixtures",
    "height": "height of images; the data decides it in a run",
    "width": "width of images; the data decides it in a run",
    "channels": "1 for grey images, 3 for colours; the data decides it in a run",
    "patch": "height and width of the squares that images are cut into",
    "positions": "of patches: learned ones, learned ones for row and column, or none",
    "pool": "what stands for the whole image: a token before all others, or the mean",
    "token_mlp_dim": "width of the feed-forward layers along the patches; null means half of dim",
    "mixer": "what mixes patches: some attention, or a layer without",
    "num_buckets": "of similar tokens, which alone attend to each other; 1 or even",
    "chunk_length": "tokens that are compared at a time, with those of the chunk before",
    "num_hashes": "times that tokens are put into buckets, each time by other random rotations; may be changed later",
    "lsh_every": "of so many layers the last hashes and the others look around them; 1 means that all hash",
    "ff_chunk": "tokens that pass a feed-forward layer at a time, for less memory; null means all",
    "residual_streams": "one stream, or two that make each layer's input follow from its output, so that nothing is kept",
    "embedding_dim": "width of the vectors of words",
    "align_dim": "width of the network that tells how well a place of the source fits the next word",
    "maxout": "values that go to the last projection, each the larger of two",
    "clusters": "clusters that keys fall into",
    "cluster_size": "tokens that a cluster takes, or that a chunk of it holds; null means an even share of a document",
    "local_heads": "heads of a routing layer that see a window instead; null means none",
    "routing_layers": "topmost layers that route, above layers that see a window; null means all",
    "centroid_decay": "how much less older keys count for a centroid with every step",
    "commitment": "weight of the loss that draws keys to their centroids",
    "temperature": "what scores of blocks are divided by: nearer 0, sorting is nearer to a permutation",
    "sinkhorn_iterations": "how often rows and columns of the sorting matrix are balanced; null means that rows alone sum to one",
    "gumbel_noise": "how much Gumbel noise the scores of blocks have while training",
    "sortcut_blocks": "sorted blocks that all tokens see, and nothing else; null means a sorted one beside each",
    "sorting": "how blocks are sorted: by a learned network, or by comparing keys",
    "mix_with": "what else attends with the same queries, keys and values",
    "dropout": "share of values dropped while training",
    "length_scale": "how many times longer than `longest` the scaled rotary positions reach; others have no use for it",
    "memory_length": "tokens before its own that a layer remembers in training and evaluation; null means none",
    "context": "whether later tokens of a segment see more, or all see as many as are remembered",
    "clamp_length": "distances beyond this many tokens count as it; null means none do",
    "bias_sharing": "whether all layers have the same vectors in place of a query without content, or each its own",
    "compressed_length": "slots that a layer keeps for what has left its memory",
    "rate": "tokens that become one slot",
    "compression": "how tokens become slots",
    "teacher": "what a compression learns from; usual means attention reconstruction, where there is anything to learn",
    "base_recipe": "the recipe of the model that tokens may leave early",
    "base_keywords": "keywords of that recipe, but for those that data may decide",
    "rule": "who leaves: by a measure of confidence, or by what a small classifier foretells",
    "predictor": "what foretells the layer that a token needs; none where classifiers alone are trained",
    "confidence": "what a threshold is for: a margin of probabilities, how steady the stream is, or a trained unit",
    "threshold": "how sure a token must be that leaves, above 1 never; a list has one for each layer but the last",
    "threshold_decay": "how fast the threshold falls along the horizon; null means that it stays",
    "layer_weights": "whether all layers count alike in the loss, or the more the higher",
    "horizon": "the longest output, along which a decaying threshold falls",
    "classifier_sharing": "whether all layers have the same output classifier, or each its own",
    "exit_training": "whether every layer learns from every token, or from random passes that tokens leave early",
    "mixed_samples": "random passes of a mixed training, for each batch",
    "oracle": "whose choice of layers is learned: by how likely what was right is, or by where it is chosen",
    "smoothing": "how far the scores of neighbours count for an oracle; 0 means not at all",
    "layer_penalty": "what each layer costs an oracle",
    "exit_weight": "what foretelling layers counts in the loss",
    "norm_order": "where norms stand: after each sum, before each branch, or around it",
}
"""What the keywords mean that recipes have in common: each has one spelling and one meaning everywhere."""


def promises(card: RecipeCard) -> list[str]:
    """The names of the promises that the card makes."""
    return [name for name in PROMISES if getattr(card, name)]


def year(card: RecipeCard) -> int | None:
    """The year of the first paper that the card names."""
    found = re.search(r"\b(19|20)\d\d\b", card.paper)
    return int(found[0]) if found else None


class KeywordDoc(NamedTuple):
    """One keyword of a recipe: its type in words, its default, and what it means where that is common knowledge."""

    name: str
    type: str
    default: Any
    meaning: str


def keywords(recipe: Recipe) -> list[KeywordDoc]:
    """The keywords of a recipe, in the order of its signature."""
    return [
        KeywordDoc(
            parameter.name, type_text(parameter.annotation), parameter.default, COMMON_KEYWORDS.get(parameter.name, "")
        )
        for parameter in recipe.signature.parameters.values()
    ]


def type_text(annotation: Any) -> str:
    """A type as people say it: `int or null`, `pre, post or sandwich`."""
    if get_origin(annotation) is Literal:
        return _either([str(value) for value in get_args(annotation)])
    if get_origin(annotation) in (Union, UnionType):
        return _either([type_text(part) for part in get_args(annotation)])
    if annotation is type(None):
        return "null"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
