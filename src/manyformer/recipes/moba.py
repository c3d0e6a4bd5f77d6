"""MoBA: a language model whose queries choose the blocks of keys that they attend to."""

from typing import Annotated

from manyformer.models import LanguageModel, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.sparse.moba_kernel import MoBAKernel
from manyformer.recipes.parts.baselines import NormOrder, attention_layers, check_heads, init_std, language_model
from manyformer.recipes.parts.keywords import BlockLength, PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Mixture of Block Attention",
    paper="Lu et al. 2025, MoBA: Mixture of Block Attention for Long-Context LLMs, arXiv:2502.13189",
    summary="A query attends to its own block of keys and to the few earlier ones whose mean key it matches best.",
    task=LANGUAGE_MODELLING,
    family="sparse",
    cost="O(l blocks_seen block_length d + l^2 d / block_length + l d^2) per layer",
    reasons={"attention_dropout": "queries choose blocks of keys in a kernel of its own"},
    tiny_keywords={"block_length": 5, "blocks_seen": 2},
)
def moba(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    block_length: BlockLength = 128,
    blocks_seen: Annotated[PositiveSize, "number of blocks that a token attends to, with its own"] = 3,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """`transformer-lm` with rotary positions and MoBA in all layers; blocks are counted from a document's first token.

    Section 2.2. The paper has blocks of 512 (of 4,096 in texts of a million tokens) and 3 to 12 of them, and full
    attention in the last layers of some models."""
    check_heads(dim, heads)
    position = RotaryPosition(dim // heads)
    # queries choose blocks without a gradient: block means are pooled keys, and nothing but the top k is read of them
    layer = attention_layers(
        dim, heads, ff_dim, lambda number: MoBAKernel(block_length, blocks_seen), position=position
    )
    embed = TokenEmbedding(vocab, dim, std=init_std(dim), dropout=dropout)
    return language_model(embed, depth, layer, dropout=dropout, norm_order=norm_order)
