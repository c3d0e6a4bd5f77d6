"""Infini-attention: a language model with softmax inside segments, and a compressive memory of those before."""

from typing import Annotated

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.linear.infini_kernel import InfiniKernel, InfiniUpdate
from manyformer.nn.positions import RotaryPosition
from manyformer.recipes.parts.baselines import NormOrder, check_heads, rms_decoder
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Infini-attention",
    paper="Munkhdalai et al. 2024, Leave No Context Behind: Efficient Infinite Context Transformers with "
    "Infini-attention, arXiv:2404.07143",
    summary="Softmax attention inside a segment, and a linear memory of the earlier ones, mixed by a gate per head.",
    task=LANGUAGE_MODELLING,
    family="memory",
    constant_state=True,
    cost="O(l segment_length d + l d^2) per layer; a state of one segment and a memory of constant size",
    reasons={
        "attention_dropout": "softmax is mixed with a memory in a kernel of its own",
        "attention_maps": "earlier segments are a memory, without weights of their tokens",
    },
    tiny_keywords={"segment_length": 5},
)
def infini_attention(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    kv_heads: int | None = None,
    ff_dim: int | None = None,
    segment_length: Annotated[
        PositiveSize, "number of tokens in a segment, counted from a document's first token"
    ] = 256,
    update_rule: Annotated[
        InfiniUpdate, "how a segment enters the memory: as it is (sum), or less what the memory returns for it (delta)"
    ] = "delta",
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """Infini-attention in the block of Llama, with rotary positions inside segments; gates begin at one half.

    Section 2. The paper has segments of 2,048 tokens, and gradients through all segments of a row, as here."""
    check_heads(dim, heads)
    rotary = RotaryPosition(dim // heads, pairs="halves")

    def layer(number: int) -> dict[str, Layer]:
        # rotated inside the kernel: the memory must be read by vectors that no position has turned
        kernel = InfiniKernel(heads, segment_length, update=update_rule, position=rotary)
        return {
            "attention": Attention(dim, heads, kernel, kv_heads=kv_heads, bias=False),
            "ff": GatedFeedForward(dim, ff_dim),
        }

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout, norm_order=norm_order, norm_eps=None)
