"""A recipe's card for readers: what lists, explanations and the documentation's table say alike."""

import re
from types import UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from manyformer.recipes.registry import Card, Recipe

PROMISES = {
    "causal": "no output depends on a later token",
    "streams": "it goes on from a state, step by step as in one pass",
    "cross": "it attends to a second sequence",
    "padding": "padding and packing leave results unchanged",
}

GLOSSARY = {
    "vocab": "number of token ids; the data decides it in a run",
    "source_vocab": "number of the source's token ids where it has its own; null means one vocabulary for both sides",
    "classes": "number of labels; the data decides it in a run",
    "dim": "width of the residual stream",
    "depth": "number of layers (on either side of an encoder-decoder), or of the steps of one that is repeated",
    "halting": "by adaptive computation time as in the paper, as its released code has it, or after a fixed number",
    "ponder": "what a step costs, as a share of the loss",
    "transition": "what follows attention in each step: a feed-forward layer, or two depth-separable convolutions",
    "signal": "of the step's number: sines and cosines, learned, or none",
    "bias": "where the halting probability begins, before its sigmoid: 1 means two steps at first, -3 some twenty",
    "heads": "attention heads; they share the width",
    "kv_heads": "heads of keys and values, shared by groups of query heads; null means as many as heads",
    "hidden": "width inside the feed-forward layers; null means the usual multiple of dim",
    "gelu": "the activation exactly, or by its tanh approximation, which published weights may have been trained with",
    "longest": "longest sequence that learned positions allow; a run takes it from the data unless given",
    "features": "random features for each head, of which nearer estimates need more",
    "slots": "mixtures that stand for all keys, in the lowest layer",
    "top_slots": "the same in the topmost layer, changing evenly between; null means as many",
    "projection": "how tokens become slots: by learned weights, as mean or largest of stretches, or by a convolution",
    "sharing": "who has the same projection: nobody, all heads, also keys and values, also all layers",
    "redraw": "random features are drawn anew after so many training steps; null means never",
    "directions": "random directions orthogonal to each other in blocks, or independent",
    "memory": "how a causal memory takes in a token: by adding, by fading and adding, or by correcting what it says",
    "clip": "distances beyond this many tokens are alike",
    "tables": "whether each head has relative positions of its own, or all heads of a layer the same",
    "window": "how many positions a token sees: on either side of an encoder's, up to itself in a language model",
    "top": "the window of the topmost layer, growing evenly from the lowest; null means the same",
    "span": "how far back a head may look at most",
    "ramp": "keys over which attention fades out beyond a span",
    "begin": "where spans start from, as a share of the longest",
    "price": "what a span costs, as a share of the loss for each token of its length",
    "spans": "whether each head learns one span, each token has its own, or all look back as far as they may",
    "dilated": "heads that see every second position or fewer, in the upper half of the layers",
    "globals": "first tokens of a document that see all and are seen by all; null means those that a call names alone",
    "part": "tokens that have a summary together, where nobody says what the parts of a text are",
    "summaries": "global tokens before each document, which belong to no text",
    "reads": "what a summary sees of the text: all of it, or its own part",
    "projections": "whether summaries and text have the same projections, or each piece of attention its own",
    "contrast": "share of the loss that tells hidden parts of a text apart by their summaries; null means none",
    "stride": "length of a block, or distance between the positions seen further back",
    "summary": "positions at the end of each block that later blocks see",
    "pattern": "whether blocks end in positions that all later ones see, or every so many-th position is seen",
    "use": "both sets in every head, one in each layer in turn, or one in each head in turn",
    "random": "random blocks that each block sees",
    "block": "positions in a block",
    "before": "positions right before its block that a token sees, too; null means none",
    "rows": "height of the blocks that images are written in; the data decides it in a run",
    "columns": "width of the blocks that images are written in; the data decides it in a run",
    "above": "rows above its block that a pixel sees; null means none",
    "beside": "columns beside its block that a pixel sees: on both sides above it, and on its left; null means none",
    "mixtures": "logistic distributions that levels are cut from; null means a class for each level",
    "blocks": "number of blocks that a sequence is cut into",
    "attending": "topmost layers that attend, after layers that do not; null means none",
    "weights": "whether weights along the sequence belong to pairs of positions or to distances",
    "attention": "width of a small attention beside the gate; null means there is none",
    "shared": "dimensions of queries and keys that all heads share; null means a quarter of dim",
    "scores": "where attention weights come from: the query, the positions alone, query and key, or mixtures",
    "height": "height of images; the data decides it in a run",
    "width": "width of images; the data decides it in a run",
    "channels": "1 for grey images, 3 for colours; the data decides it in a run",
    "patch": "height and width of the squares that images are cut into",
    "positions": "of patches: learned ones, learned ones for row and column, or none",
    "pool": "what stands for the whole image: a token before all others, or the mean",
    "mixing": "width of the feed-forward layers along the patches; null means half of dim",
    "mixer": "what mixes patches: some attention, or a layer without",
    "buckets": "of similar tokens, which alone attend to each other; 1 or even",
    "chunk": "tokens that are compared at a time, with those of the chunk before",
    "rounds": "times that tokens are put into buckets, each time by other random rotations; may be changed later",
    "every": "of so many layers the last hashes and the others look around them; 1 means that all hash",
    "ff_chunk": "tokens that pass a feed-forward layer at a time, for less memory; null means all",
    "residual": "one stream, or two that make each layer's input follow from its output, so that nothing is kept",
    "words": "width of the vectors of words",
    "align": "width of the network that tells how well a place of the source fits the next word",
    "maxout": "values that go to the last projection, each the larger of two",
    "clusters": "clusters that keys fall into",
    "members": "tokens that a cluster takes, or that a chunk of it holds; null means an even share of a document",
    "local": "heads of a routing layer that see a window instead; null means none",
    "routed": "topmost layers that route, above layers that see a window; null means all",
    "decay": "how much less older keys count for a centroid with every step",
    "commitment": "weight of the loss that draws keys to their centroids",
    "temperature": "what scores of blocks are divided by: nearer 0, sorting is nearer to a permutation",
    "steps": "how often rows and columns of the sorting matrix are balanced; null means that rows alone sum to one",
    "noise": "how much Gumbel noise the scores of blocks have while training",
    "cut": "sorted blocks that all tokens see, and nothing else; null means a sorted one beside each",
    "sorting": "how blocks are sorted: by a learned network, or by comparing keys",
    "mixture": "what else attends with the same queries, keys and values",
    "dropout": "share of values dropped while training",
    "stretch": "how many times longer than `longest` the scaled rotary positions reach; others have no use for it",
    "remembered": "tokens before its own that a layer remembers in training and evaluation; null means none",
    "view": "whether later tokens of a segment see more, or all see as many as are remembered",
    "clamp": "distances beyond this many tokens count as it; null means none do",
    "biases": "whether all layers have the same vectors in place of a query without content, or each its own",
    "compressed": "slots that a layer keeps for what has left its memory",
    "rate": "tokens that become one slot",
    "compression": "how tokens become slots",
    "teacher": "what a compression learns from; usual means attention reconstruction, where there is anything to learn",
    "of": "the recipe of the model that tokens may leave early",
    "inner": "keywords of that recipe, but for those that data may decide",
    "rule": "who leaves: by a measure of confidence, or by what a small classifier foretells",
    "predictor": "what foretells the layer that a token needs; none where classifiers alone are trained",
    "confidence": "what a threshold is for: a margin of probabilities, how steady the stream is, or a trained unit",
    "threshold": "how sure a token must be that leaves, above 1 never; a list has one for each layer but the last",
    "fade": "how fast the threshold falls along the horizon; null means that it stays",
    "layer_weights": "whether all layers count alike in the loss, or the more the higher",
    "horizon": "the longest output, along which a decaying threshold falls",
    "classifiers": "whether all layers have the same output classifier, or each its own",
    "training": "whether every layer learns from every token, or from random passes that tokens leave early",
    "draws": "random passes of a mixed training, for each batch",
    "oracle": "whose choice of layers is learned: by how likely what was right is, or by where it is chosen",
    "smoothing": "how far the scores of neighbours count for an oracle; 0 means not at all",
    "penalty": "what each layer costs an oracle",
    "exit_weight": "what foretelling layers counts in the loss",
    "norm": "where norms stand: after each sum, before each branch, or around it",
}
"""What the keywords mean that recipes have in common: each has one spelling and one meaning everywhere."""


def promises(card: Card) -> list[str]:
    """The names of the promises that the card makes."""
    return [name for name in PROMISES if getattr(card, name)]


def year(card: Card) -> int | None:
    """The year of the first paper that the card names."""
    found = re.search(r"\b(19|20)\d\d\b", card.paper)
    return int(found[0]) if found else None


class Keyword(NamedTuple):
    """One keyword of a recipe: its type in words, its default, and what it means where that is common knowledge."""

    name: str
    type: str
    default: Any
    meaning: str


def keywords(recipe: Recipe) -> list[Keyword]:
    """The keywords of a recipe, in the order of its signature."""
    return [
        Keyword(parameter.name, in_words(parameter.annotation), parameter.default, GLOSSARY.get(parameter.name, ""))
        for parameter in recipe.signature.parameters.values()
    ]


def in_words(annotation: Any) -> str:
    """A type as people say it: `int or null`, `pre, post or sandwich`."""
    if get_origin(annotation) is Literal:
        return _either([str(value) for value in get_args(annotation)])
    if get_origin(annotation) in (Union, UnionType):
        return _either([in_words(part) for part in get_args(annotation)])
    if annotation is type(None):
        return "null"
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
