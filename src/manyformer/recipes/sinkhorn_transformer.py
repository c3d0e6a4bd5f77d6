"""The Sinkhorn Transformer: each block attends to itself and to a block assigned by a learned sorting."""

from typing import Annotated, Literal

from manyformer.kernels import Kernel, SinkhornKernel, SoftmaxKernel, SumKernel
from manyformer.kernels.block_sorting import BilinearSorting, MLPSorting, SortingNetwork
from manyformer.masks import Causal, Mask
from manyformer.models import LanguageModel, MaskedLM
from manyformer.recipes.baselines import AddedPosition, embedding_with, language_model, masked_lm
from manyformer.recipes.keywords import BlockLength, PositiveSize
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder
from manyformer.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.tasks.masked_language_modelling import MASKED_LM

PAPER = "Tay et al. 2020, Sparse Sinkhorn Attention, arXiv:2002.11296"
SUMMARY = "A learned matrix, nearly a permutation, sorts blocks, so that local attention reaches distant ones."

TINY = {"block": 4}

SortingKind = Annotated[
    Literal["network", "products"], "how blocks are scored: by a learned network, or by products of block summaries"
]
SinkhornMixture = Annotated[
    Literal["none", "softmax"], "attention added to the sorted one, with the same queries, keys and values"
]

POSITIONS: dict[SortingKind, AddedPosition] = {"network": "learned", "products": "sinusoid"}
"""Positions by kind of sorting: a network is limited to a number of blocks, products allow any length."""

SortingTemperature = Annotated[
    float, "divides the block scores: the lower, the closer the sorting matrix is to a permutation"
]
SinkhornIterations = Annotated[
    PositiveSize | None, "number of Sinkhorn normalizations of rows and columns; null means that only rows sum to one"
]
GumbelNoise = Annotated[float, "scale of the Gumbel noise added to block scores in training"]


@recipe(
    "Sinkhorn Transformer",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    cost="O(l block d + l^2 d / block + l d^2) per layer; with mix_with=softmax O(l^2 d)",
    tiny_keywords=TINY,
)
def sinkhorn_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 2048,
    block: BlockLength = 64,
    sorting: SortingKind = "network",
    temperature: SortingTemperature = 0.75,
    sinkhorn_iterations: SinkhornIterations = None,
    gumbel_noise: GumbelNoise = 1.0,
    mix_with: SinkhornMixture = "none",
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """Section 3.3: sorting assigns earlier blocks to a block, from its first token and the past; else `transformer-lm`.

    Balancing is off by default: among earlier blocks only, the one matrix whose rows and columns all sum to one assigns
    to every block the previous one, and `sinkhorn_iterations` converge to it. `sorting="network"` is the paper's, up to
    `max_length` tokens; "products" compares keys, with sinusoids and at any length. `mix_with="softmax"` adds standard
    attention of the same queries, keys and values (section 3.5)."""

    def kernel(number: int) -> Kernel:
        net = _sorting_network(sorting, heads, dim // heads, -(-max_length // block), causal=True)
        sinkhorn = SinkhornKernel(
            net, block, Causal(), temperature=temperature, iterations=sinkhorn_iterations, gumbel_noise=gumbel_noise
        )
        return _mix_kernels(sinkhorn, Causal(), mix_with)

    embed = embedding_with(POSITIONS[sorting], vocab, dim, max_length, dropout=dropout)
    return language_model(embed, depth, heads, ff_dim, kernel, dropout=dropout, norm_order=norm_order)


@recipe(
    "Sinkhorn encoder",
    paper=PAPER,
    summary=SUMMARY,
    task=MASKED_LM,
    cost="O(l block d + l^2 d / block + l d^2) per layer; with sortcut_blocks O(l sortcut_blocks block d + l d^2)",
    reasons={
        "causal": "a block can be assigned a later one; `sinkhorn-transformer` is the causal recipe",
        "incremental_decoding": "a later token changes the sorting of all blocks, so no state can be cached",
    },
    tiny_keywords=TINY,
)
def sinkhorn_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 2048,
    block: BlockLength = 64,
    sorting: SortingKind = "network",
    temperature: SortingTemperature = 0.75,
    sinkhorn_iterations: SinkhornIterations = 8,
    gumbel_noise: GumbelNoise = 1.0,
    sortcut_blocks: Annotated[
        PositiveSize | None,
        "number of sorted blocks that all tokens attend to (SortCut); null means one sorted block for each block",
    ] = None,
    mix_with: SinkhornMixture = "none",
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> MaskedLM:
    """Sections 3.1, 3.2 and 3.4, for masked tokens: sorting over all blocks, balanced by `sinkhorn_iterations`.

    With `sortcut_blocks` every token attends only to that many sorted blocks (SortCut). The other keywords are those of
    `sinkhorn-transformer`."""

    def kernel(number: int) -> Kernel:
        net = _sorting_network(sorting, heads, dim // heads, -(-max_length // block), causal=False)
        sinkhorn = SinkhornKernel(
            net,
            block,
            temperature=temperature,
            iterations=sinkhorn_iterations,
            gumbel_noise=gumbel_noise,
            sortcut_blocks=sortcut_blocks,
        )
        return _mix_kernels(sinkhorn, None, mix_with)

    embed = embedding_with(POSITIONS[sorting], vocab, dim, max_length, dropout=dropout)
    return masked_lm(embed, depth, heads, ff_dim, kernel, dropout=dropout, norm_order=norm_order)


def _sorting_network(
    sorting: SortingKind, heads: int, head_dim: int, num_blocks: int, *, causal: bool
) -> SortingNetwork:
    return (
        MLPSorting(heads, head_dim, num_blocks, causal=causal)
        if sorting == "network"
        else BilinearSorting(heads, head_dim, causal=causal)
    )


def _mix_kernels(sinkhorn: SinkhornKernel, mask: Mask | None, mix_with: SinkhornMixture) -> Kernel:
    """Sinkhorn attention, or its sum with standard attention."""
    return sinkhorn if mix_with == "none" else SumKernel(sinkhorn, SoftmaxKernel(mask))
