"""Blockwise attention: each head attends to one block of keys, its query's own block or a permuted one."""

from typing import Annotated

from manyformer.base.errors import UserError
from manyformer.models import MaskedLM
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.masks import Mask, PerHead, PermutedBlocks
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "BlockBERT",
    paper="Qiu et al. 2020, Blockwise Self-Attention for Long Document Understanding, arXiv:1911.02972",
    summary="Each head has a permutation of a few blocks: attention needs less memory by the number of blocks.",
    task=MASKED_LM,
    family="sparse",
    cost="O(l^2 d / n + l d^2) per layer, n blocks",
    reasons={"convex_weights": "a query whose block has no key gets zeros"},
    tiny_keywords={"blocks": 2, "max_length": 48},
)
def blockwise(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 512,
    blocks: Annotated[PositiveSize, "number of blocks that a sequence is divided into"] = 2,
    dropout: float = 0.1,
) -> MaskedLM:
    """BERT most of whose heads attend to the query's own block, the others to a block further on, cyclically.

    Section 3.1 and table 3: of 12 heads 10 and 2 for two blocks, 8, 2 and 2 for three. A block is `max_length` /
    `blocks` positions at every text length, so that padding changes nothing; heads whose block lies beyond the end of a
    short text output zeros."""
    if max_length % blocks:
        raise UserError(f"max_length ({max_length}) must be a multiple of blocks ({blocks})")
    # one mask for all layers: which head looks how far is the same everywhere
    mask = shifted_blocks_mask(heads, max_length // blocks, blocks)

    def attention(number: int) -> Layer:
        return Attention(dim, heads, SoftmaxKernel(mask))

    return masked_encoder(vocab, dim, depth, heads, ff_dim, dropout, max_length=max_length, make_attention=attention)


def shifted_blocks_mask(heads: int, size: int, blocks: int) -> Mask:
    """The mask whose last heads, a sixth for each distance (at least one), attend that many blocks further on."""
    # of 12 heads the paper gives 2 to each distance, whatever the number of blocks
    heads_per_distance = max(heads // 6, 1)
    if heads_per_distance * (blocks - 1) > heads:
        raise UserError(f"heads ({heads}) are too few for {blocks} blocks: every distance needs at least one head")
    masks: dict[int, Mask] = {}
    for distance in range(1, blocks):
        for number in range(heads_per_distance):
            order = [(block + distance) % blocks for block in range(blocks)]
            masks[heads - heads_per_distance * distance + number] = PermutedBlocks(size, *order)
    return PerHead(masks, default=PermutedBlocks(size, *range(blocks)))
