"""Names that people type for published sizes of a recipe, such as `gpt2` or `bert-base`, with those sizes.

Such a name stands for a recipe with other defaults: every keyword may still be given, and a saved model names the
recipe itself. The sizes are those of the released configurations.
"""

import re
from typing import Any, NamedTuple


class PublishedSize(NamedTuple):
    """A released model as a recipe with sizes."""

    recipe: str
    title: str
    keywords: dict[str, Any]


def _gpt2(title: str, dim: int, depth: int, heads: int) -> PublishedSize:
    sizes = {"vocab": 50257, "dim": dim, "depth": depth, "heads": heads, "ff_dim": 4 * dim, "max_length": 1024}
    return PublishedSize("transformer-lm", title, {**sizes, "gelu_approximate": "tanh", "dropout": 0.1})


def _bert(title: str, dim: int, depth: int, heads: int, **others: Any) -> PublishedSize:
    sizes = {"dim": dim, "depth": depth, "heads": heads, "ff_dim": 4 * dim}
    return PublishedSize("bert", title, {"vocab": 30522, **sizes, "sentence_types": 2, **others})


def _roberta(title: str, dim: int, depth: int, heads: int) -> PublishedSize:
    return _bert(title, dim, depth, heads, vocab=50265, sentence_types=1, norm_eps=1e-5)


def _t5(title: str, dim: int, depth: int, heads: int, ff_dim: int) -> PublishedSize:
    sizes = {"dim": dim, "depth": depth, "decoder_depth": depth, "heads": heads, "ff_dim": ff_dim}
    return PublishedSize("t5", title, {"vocab": 32128, **sizes})


def _vit(title: str, dim: int, depth: int, heads: int, patch: int) -> PublishedSize:
    sizes = {"dim": dim, "depth": depth, "heads": heads, "ff_dim": 4 * dim, "patch": patch}
    return PublishedSize("vit", title, {**sizes, "dropout": 0.0, "norm_eps": 1e-12})


def _llama(title: str, kv_heads: int, ff_dim: int, **others: Any) -> PublishedSize:
    sizes = {"dim": 4096, "depth": 32, "heads": 32, "kv_heads": kv_heads, "head_dim": 128, "ff_dim": ff_dim}
    return PublishedSize("llama", title, {"vocab": 32000, **sizes, **others})


PUBLISHED_SIZES: dict[str, PublishedSize] = {
    "gpt2": _gpt2("GPT-2", 768, 12, 12),
    "gpt2-medium": _gpt2("GPT-2 medium", 1024, 24, 16),
    "gpt2-large": _gpt2("GPT-2 large", 1280, 36, 20),
    "gpt2-xl": _gpt2("GPT-2 XL", 1600, 48, 25),
    "bert-base": _bert("BERT base", 768, 12, 12),
    "bert-large": _bert("BERT large", 1024, 24, 16),
    "roberta-base": _roberta("RoBERTa base", 768, 12, 12),
    "roberta-large": _roberta("RoBERTa large", 1024, 24, 16),
    "t5-small": _t5("T5 small", 512, 6, 8, 2048),
    "t5-base": _t5("T5 base", 768, 12, 12, 3072),
    "t5-large": _t5("T5 large", 1024, 24, 16, 4096),
    "vit-b/16": _vit("ViT-B/16", 768, 12, 12, 16),
    "vit-l/16": _vit("ViT-L/16", 1024, 24, 16, 16),
    "llama-2-7b": _llama("Llama 2 7B", 32, 11008),
    "mistral-7b": _llama("Mistral 7B", 8, 14336, window=4096),
}
"""The published sizes by name."""

ALIASES = {
    "gpt-2": "gpt2",
    "gpt2-small": "gpt2",
    "bert-base-uncased": "bert-base",
    "bert-large-uncased": "bert-large",
    "roberta": "roberta-base",
    "vit-b-16": "vit-b/16",
    "vit-base-patch16-224": "vit-b/16",
    "vit-l-16": "vit-l/16",
    "vit-large-patch16-224": "vit-l/16",
    "llama-2": "llama-2-7b",
    "llama-2-7b-hf": "llama-2-7b",
    "llama2": "llama-2-7b",
    "mistral": "mistral-7b",
}
"""Other names of published sizes."""

READ_BY_IMPORT = "`manyformer import` reads its folders"

NEAREST_RECIPES = {
    "albert": ("bert", "its layers share one set of weights, and its embedding of 128 channels is projected"),
    "bart": (
        "transformer",
        "with position=learned embedding_norm=true scaled_embedding=false activation=gelu output_bias=true it is the "
        f"same, and {READ_BY_IMPORT}",
    ),
    "bloom": ("alibi", "it has a norm behind the embedding, and its activation is GELU by tanh"),
    "deberta": (
        "bert",
        "its scores have parts from contents to relative positions and back, and no absolute positions",
    ),
    "deit": ("vit", f"distillation_token=unread gives it the second token, and {READ_BY_IMPORT}"),
    "distilbert": ("bert", f"it has 6 layers, depth=6, and no types of sentences; {READ_BY_IMPORT}"),
    "electra": ("bert", "it learns to tell replaced tokens, and its small sizes project an embedding of 128 channels"),
    "falcon": (
        "compose",
        "attention and feed-forward run side by side; take position=rope kv_heads=1, for the sizes with ALiBi "
        "position=alibi",
    ),
    "gemma": (
        "llama",
        "take scaled_embedding=true tied=true ff_activation=gelu-tanh; its norms multiply by 1 + w, and later versions "
        f"have windows and caps; {READ_BY_IMPORT}",
    ),
    "gpt-3": ("transformer-lm", "every second layer attends to a band, as in sparse-transformer"),
    "gpt-j": ("compose", "attention and feed-forward run side by side, from one norm; take position=rope"),
    "gpt-neox": ("compose", "attention and feed-forward run side by side, each from its own norm; take position=rope"),
    "hyena": ("mamba", "it mixes tokens by long convolutions and gates, and keeps no state of constant size"),
    "marian": (
        "transformer",
        f"with position=sinusoid-halves activation=silu output_bias=true it is the same, and {READ_BY_IMPORT}",
    ),
    "opt": ("compose", "take position=learned feedforward=relu; the size of 350M normalizes behind each branch"),
    "phi": (
        "compose",
        "attention and feed-forward run side by side, from one norm, and a part of each head is rotated; take "
        "position=rope",
    ),
    "phi-3": ("llama", READ_BY_IMPORT),
    "phi-4": ("llama", READ_BY_IMPORT),
    "pythia": ("compose", "attention and feed-forward run side by side, each from its own norm; take position=rope"),
    "qwen": ("llama", f"take biases=qkv; {READ_BY_IMPORT}"),
    "qwen3.5": ("qwen3-5", "of those with experts qwen3-next, whose layers have the same mixers"),
    "qwen3": ("llama", f"take qk_norm=true, without biases; {READ_BY_IMPORT}"),
    "s4": ("mamba", "its state space does not depend on the token"),
    "swin": ("vit", "it attends within windows that shift, on several scales"),
    "whisper": (
        "speech-transformer",
        "it reads log-mel frames of 30 s through two convolutions along time, and its decoder has learned positions",
    ),
    "xlnet": ("transformer-xl", "it predicts tokens in permuted orders, with attention in two streams"),
}
"""Families of published models without a recipe of that name: the nearest one, and in what the model differs.

Read against the configuration and the model of each family in transformers 5.24, and of those that it does not have
against their papers: GPT-3 (arXiv:2005.14165, section 2.1), Hyena (arXiv:2302.10866), S4 (arXiv:2111.00396)."""


def published_size(name: str) -> PublishedSize | None:
    """The published size of that name, under which people may know it by another one; None if there is none."""
    return PUBLISHED_SIZES.get(ALIASES.get(name.lower(), name.lower()))


def nearest_recipe(name: str) -> str | None:
    """A sentence about the recipe that is nearest to a published model without one, such as bloom-560m."""
    plain = name.lower().rpartition("/")[2]
    # the longest, because of gpt-neox and others that begin alike
    for family in sorted(NEAREST_RECIPES, key=len, reverse=True):
        # gptj and phi3 are the same as gpt-j and phi-3
        if re.match(rf"{family.replace('-', '-?')}(?![a-z])", plain):
            recipe, difference = NEAREST_RECIPES[family]
            return f"the nearest recipe is {recipe}: {difference}"
    return None
