"""The Sparse Transformer: two factorized attention patterns connect every token to every earlier one in two layers."""

from functools import partial
from typing import Annotated, Literal, final

from jaxtyping import Float
from torch import Tensor, nn

from manyformer.models import ClassHead, LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import (
    Mask,
    MaskByLayer,
    alternate_heads,
    alternate_layers,
    fixed_pattern,
    strided_pattern,
    union,
)
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import grid_embedding, init_std, learned_embedding, scale_residual_init, stack
from manyformer.recipes.parts.keywords import PositiveSize
from manyformer.recipes.parts.registry import recipe

SparsePattern = Annotated[
    Literal["strided", "fixed"],
    "later tokens attend to the last positions of each block (fixed), or to every stride-th position (strided)",
]
PatternUse = Annotated[
    Literal["merged", "interleaved", "heads"],
    "both position sets in every head (merged), alternating by layer (interleaved), or alternating by head",
]


@recipe(
    "Sparse Transformer",
    paper="Child et al. 2019, Generating Long Sequences with Sparse Transformers, arXiv:1904.10509",
    summary="Two small sets of earlier positions that connect all positions in two steps: l sqrt(l) instead of l^2.",
    task=LANGUAGE_MODELLING,
    family="sparse",
    cost="O(l sqrt(l) d + l d^2) per layer",
    tiny_keywords={"stride": 4, "summary": 1, "max_length": 128},
)
def sparse_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 30,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 12288,
    stride: Annotated[PositiveSize, "length of a block, or distance between attended earlier positions"] = 128,
    summary: Annotated[PositiveSize, "number of positions at the end of each block that later blocks attend to"] = 32,
    pattern: SparsePattern = "fixed",
    pattern_use: PatternUse = "merged",
    position: Annotated[
        Literal["learned", "grid"],
        "a learned vector for each position (learned), or the sum of one for its row of stride and one for its column",
    ] = "learned",
    dropout: float = 0.4,
) -> LanguageModel:
    """Pre-norm, x sigmoid(1.702 x), scaled-down initialization of branch outputs; defaults are those for enwik8.

    Sections 4.2, 5.2 and 5.4. With "fixed", later tokens attend to the last `summary` positions of each block of
    `stride`; with "strided", to every `stride`-th position. The two sets are merged in every head, alternate by layer,
    or alternate by head. With `position="grid"` each position has the sum of two learned vectors as in the paper, which
    is then the published 95 M parameters, by default one of its own; the paper's gradient checkpointing and half
    precision are settings of the run."""
    # union of both sets in each head, one set in each layer, or one in each head
    mask_of_layer = masks_by_layer(pattern, pattern_use, stride, summary, heads)

    def layer(number: int) -> dict[str, Layer]:
        return {
            "attention": Attention(dim, heads, SoftmaxKernel(mask_of_layer(number))),
            "ff": FeedForward(dim, ff_dim, activation=SigmoidGELU()),
        }

    body = stack(depth, layer, order="pre", norm=partial(nn.LayerNorm, dim), dropout=dropout)
    if position == "grid":
        # row and column in a grid as wide as the stride: the two ways that "strided" attends along
        embed = grid_embedding(vocab, dim, -(-max_length // stride), stride, dropout=dropout)
    else:
        embed = learned_embedding(vocab, dim, max_length, dropout=dropout)
    # section 5.2: outputs of branches begin smaller by sqrt(2 depth), so that the stream does not grow with depth
    scale_residual_init(body, depth, std=init_std(dim))
    return LanguageModel(embed, body, ClassHead(dim, vocab, tied=embed.token))


@final
class SigmoidGELU(nn.Module):
    """x sigmoid(1.702 x), an approximation of GELU (Child et al. 2019, section 5.2)."""

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        return x * (1.702 * x).sigmoid()


def masks_by_layer(
    pattern: SparsePattern, pattern_use: PatternUse, stride: int, summary: int, heads: int
) -> MaskByLayer:
    """The mask of each layer (section 4.3). With `pattern_use="heads"` each pair of heads has its own summaries."""
    if pattern == "strided":
        pairs: list[tuple[Mask, Mask]] = [strided_pattern(stride)]
    else:
        num_verses = 1
        # heads that summarize different positions of a block see more of it together (section 4.3, multi-head)
        if pattern_use == "heads":
            num_verses = max(min(heads // 2, stride // summary), 1)
        pairs = [fixed_pattern(stride, summary, part_index=verse) for verse in range(num_verses)]
    if pattern_use == "heads":
        mask = alternate_heads([pattern_mask for pair in pairs for pattern_mask in pair], heads)
        return lambda layer: mask
    if pattern_use == "merged":
        merged = union(pairs[0])
        return lambda layer: merged
    return alternate_layers(pairs[0])
