"""Blockwise attention: each head looks at one block of keys, the own one or another."""

from manyformer.attention import Attention
from manyformer.errors import UserError
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Mask, PerHead, PermutedBlocks
from manyformer.models import MaskedLM
from manyformer.position import LearnedPosition
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import init_std


@recipe(
    "BlockBERT",
    paper="Qiu et al. 2020, Blockwise Self-Attention for Long Document Understanding, arXiv:1911.02972",
    summary="A few blocks and a permutation of them for each head: attention needs less memory by their number.",
    task="masked",
    cost="O(l^2 d / n + l d^2) per layer, n blocks",
    reasons={
        "causal": "every token sees both sides: that is the point",
        "incremental_decoding": "a later token changes all earlier outputs, so nothing can be kept",
        "cross_attention": "it reads one sequence only",
    },
    tiny_keywords={"blocks": 2, "max_length": 48},
)
def blockwise(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    max_length: int = 512,
    blocks: int = 2,
    dropout: float = 0.1,
) -> MaskedLM:
    """BERT whose first heads, most of them, see their own block, and whose others see a block further on, cyclically.

    Section 3.1 and table 3: of 12 heads 10 and 2 for two blocks, 8, 2 and 2 for three. A block is `max_length` /
    `blocks` positions whatever the length of a text, so that padding changes nothing; in the last block of a short
    text, heads whose block is not there give zeros."""
    if max_length % blocks:
        raise UserError(f"longest ({max_length}) must be a multiple of blocks ({blocks})")
    mask = shifts(heads, max_length // blocks, blocks)
    position = LearnedPosition(dim, max_length, std=init_std(dim))
    return masked_encoder(
        vocab,
        dim,
        depth,
        heads,
        ff_dim,
        dropout,
        embedded=position,
        mixer=lambda: Attention(dim, heads, SoftmaxKernel(mask)),
    )


def shifts(heads: int, size: int, blocks: int) -> Mask:
    """The last heads, a sixth for each distance and at least one, see the block that many further on."""
    each = max(heads // 6, 1)
    if each * (blocks - 1) > heads:
        raise UserError(f"heads ({heads}) are too few for {blocks} blocks: every distance takes one at least")
    masks: dict[int, Mask] = {}
    for distance in range(1, blocks):
        for number in range(each):
            order = [(block + distance) % blocks for block in range(blocks)]
            masks[heads - each * distance + number] = PermutedBlocks(size, *order)
    return PerHead(masks, default=PermutedBlocks(size, *range(blocks)))
