"""The Sinkhorn Transformer: each block of tokens sees itself and a block that a learned sorting puts beside it."""

from typing import Literal

from manyformer.kernels import Kernel, SinkhornKernel, SoftmaxKernel, SumKernel
from manyformer.kernels.block_sorting import BilinearSorting, MLPSorting, SortingNetwork
from manyformer.masks import Causal, Mask
from manyformer.models import LanguageModel, MaskedLM
from manyformer.recipes.baselines import AddedPosition, embedding_with, language_model, masked_lm
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder

PAPER = "Tay et al. 2020, Sparse Sinkhorn Attention, arXiv:2002.11296"
NEW = "Blocks are sorted by a matrix that is learned and nearly a permutation: what is far away comes to stand beside."
SMALL = {"block": 4}

SortingKind = Literal["network", "products"]
SinkhornMixture = Literal["none", "softmax"]

POSITIONS: dict[SortingKind, AddedPosition] = {"network": "learned", "products": "sinusoid"}
"""A network is for up to so many blocks, and so are its positions; products are for any length."""


@recipe(
    "Sinkhorn Transformer",
    paper=PAPER,
    summary=NEW,
    task="language-model",
    causal=True,
    incremental_decoding=True,
    cost="O(l block d + l^2 d / block + l d^2) per layer; with mixture=softmax O(l^2 d)",
    reasons={"cross_attention": "a language model reads one sequence only"},
    tiny_keywords=SMALL,
)
def sinkhorn_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 2048,
    block: int = 64,
    sorting: SortingKind = "network",
    temperature: float = 0.75,
    sinkhorn_iterations: int | None = None,
    gumbel_noise: float = 1.0,
    mix_with: SinkhornMixture = "none",
    dropout: float = 0.0,
    norm_order: NormOrder = "pre",
) -> LanguageModel:
    """Section 3.3: a block is given earlier blocks, by what is known at its first token; otherwise as `transformer-lm`.

    Balancing is off unless `sinkhorn_iterations` says how often: among earlier blocks only, the one matrix whose rows
    and columns all sum to one gives every block the one before it, and balancing goes there. `sorting="network"` is the
    paper's, up to `max_length` tokens; "products" compares keys, with sinusoids and for any length.
    `mix_with="softmax"` adds vanilla attention of the same queries, keys and values (section 3.5)."""

    def kernel() -> Kernel:
        net = _network(sorting, heads, dim // heads, -(-max_length // block), causal=True)
        sinkhorn = SinkhornKernel(
            net, block, Causal(), temperature=temperature, steps=sinkhorn_iterations, noise=gumbel_noise
        )
        return _mixed(sinkhorn, Causal(), mix_with)

    embed = embedding_with(POSITIONS[sorting], vocab, dim, max_length, dropout=dropout)
    return language_model(embed, depth, heads, ff_dim, kernel, dropout=dropout, norm_order=norm_order)


@recipe(
    "Sinkhorn encoder",
    paper=PAPER,
    summary=NEW,
    task="masked",
    cost="O(l block d + l^2 d / block + l d^2) per layer; with cut O(l cut block d + l d^2)",
    reasons={
        "causal": "every block may be given a later one; `sinkhorn-transformer` is the causal one",
        "incremental_decoding": "a later token changes how all blocks are sorted, so nothing can be kept",
        "cross_attention": "it reads one sequence only",
    },
    tiny_keywords=SMALL,
)
def sinkhorn_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    max_length: int = 2048,
    block: int = 64,
    sorting: SortingKind = "network",
    temperature: float = 0.75,
    sinkhorn_iterations: int | None = 8,
    gumbel_noise: float = 1.0,
    sortcut_blocks: int | None = None,
    mix_with: SinkhornMixture = "none",
    dropout: float = 0.1,
    norm_order: NormOrder = "pre",
) -> MaskedLM:
    """Sections 3.1, 3.2 and 3.4, for masked tokens: blocks are sorted among all blocks, balanced in
    `sinkhorn_iterations` steps.

    With `sortcut_blocks` every token sees the first so many sorted blocks alone (SortCut). The other keywords are those
    of `sinkhorn-transformer`."""

    def kernel() -> Kernel:
        net = _network(sorting, heads, dim // heads, -(-max_length // block), causal=False)
        sinkhorn = SinkhornKernel(
            net, block, temperature=temperature, steps=sinkhorn_iterations, noise=gumbel_noise, cut=sortcut_blocks
        )
        return _mixed(sinkhorn, None, mix_with)

    embed = embedding_with(POSITIONS[sorting], vocab, dim, max_length, dropout=dropout)
    return masked_lm(embed, depth, heads, ff_dim, kernel, dropout=dropout, norm_order=norm_order)


def _network(sorting: SortingKind, heads: int, key: int, blocks: int, *, causal: bool) -> SortingNetwork:
    return (
        MLPSorting(heads, key, blocks, causal=causal)
        if sorting == "network"
        else BilinearSorting(heads, key, causal=causal)
    )


def _mixed(sinkhorn: SinkhornKernel, mask: Mask | None, mixture: SinkhornMixture) -> Kernel:
    """Sorted blocks alone, or vanilla attention added."""
    return sinkhorn if mixture == "none" else SumKernel(sinkhorn, SoftmaxKernel(mask))
