"""NSA: a language model whose heads sum compressed, selected and near tokens, each with a gate."""

from typing import Annotated

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.sparse.nsa_kernel import NSAKernel, NSASizes
from manyformer.recipes.parts.baselines import NormOrder, head_width, rms_decoder
from manyformer.recipes.parts.keywords import BlockLength, CausalWindowSize, HeadDim, PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Native Sparse Attention",
    paper="Yuan et al. 2025, Native Sparse Attention: Hardware-Aligned and Natively Trainable Sparse Attention, "
    "arXiv:2502.11089",
    summary="A query attends to compressed blocks, to the blocks of tokens that these rank highest, and to a window.",
    task=LANGUAGE_MODELLING,
    family="sparse",
    cost="O(l (blocks_seen block_length + window) d + l^2 d / compression_stride + l d^2) per layer",
    reasons={
        "attention_dropout": "three attentions are summed in a kernel of its own",
        "convex_weights": "gates of three attentions add up to anything",
        "removable_heads": "heads that share keys choose their blocks together",
        "attention_maps": "a weight may be that of a compressed block",
    },
    tiny_keywords={
        "kv_heads": 1,
        "compressed_length": 4,
        "compression_stride": 2,
        "block_length": 4,
        "blocks_seen": 3,
        "window": 5,
    },
)
def nsa(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    compressed_length: Annotated[PositiveSize, "number of tokens that become one compressed key and value"] = 32,
    compression_stride: Annotated[PositiveSize, "tokens between the starts of compressed blocks"] = 16,
    block_length: BlockLength = 64,
    blocks_seen: Annotated[
        PositiveSize, "blocks of tokens that a token attends to: the first, its own, the one before, and the best"
    ] = 16,
    window: CausalWindowSize = 512,
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """NSA in the block of Llama: RMSNorm, SwiGLU, rotary positions, no biases in projections.

    Section 3, with its lengths; all heads that share keys choose the same blocks. The paper's model has 64 heads in 4
    groups, and experts. `ff_dim` is 8/3 dim unless given. Raises UserError for lengths that exclude each other."""
    width = head_width(dim, heads, head_dim)
    # selection is one for a group of heads: blocks are then read once for all of them (section 3.3.2)
    groups = kv_heads or heads
    sizes = NSASizes(compressed_length, compression_stride, block_length, blocks_seen, window)
    try:
        # here, not in the first layer, so that the sentence names keywords of the recipe
        sizes.check()
    except ValueError as error:
        raise UserError(str(error).removeprefix("NSAKernel: ")) from None
    rotary = RotaryPosition(width, pairs="halves")

    def layer(number: int) -> dict[str, Layer]:
        kernel = NSAKernel(dim, groups, width, sizes)
        attention = Attention(
            dim, heads, kernel, kv_heads=groups, head_dim=width, value_dim=width, position=rotary, bias=False
        )
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout, norm_order=norm_order, norm_eps=None)
