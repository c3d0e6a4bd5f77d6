"""Names that people type for published sizes of a recipe, such as `gpt2` or `bert-base`, with those sizes.

Such a name stands for a recipe with other defaults: every keyword may still be given, and a saved model names the
recipe itself. The sizes are those of the released configurations.
"""

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


_VIT_B_16 = _vit("ViT-B/16", 768, 12, 12, 16)
_VIT_L_16 = _vit("ViT-L/16", 1024, 24, 16, 16)

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
    "vit-b-16": _VIT_B_16,
    "vit-b/16": _VIT_B_16,
    "vit-l-16": _VIT_L_16,
    "vit-l/16": _VIT_L_16,
    "llama-2-7b": _llama("Llama 2 7B", 32, 11008),
    "mistral-7b": _llama("Mistral 7B", 8, 14336, window=4096),
}
"""The published sizes by the names that people type."""
