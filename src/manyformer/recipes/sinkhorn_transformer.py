"""The Sinkhorn Transformer: each block attends to itself and to a block assigned by a learned sorting."""

from typing import Annotated, Literal, TypedDict, Unpack

from manyformer.models import LanguageModel, MaskedLM, TokenEmbedding
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.clustered.sinkhorn_kernel import BilinearSorting, MLPSorting, SinkhornKernel, SortingNetwork
from manyformer.nn.kernels.composed_kernels import SumKernel
from manyformer.nn.kernels.kernel import Kernel
from manyformer.nn.masks import AllKeys, Causal, Mask
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import (
    AddedPosition,
    LayerMaker,
    NormOrder,
    attention_layers,
    embedding_with,
    language_model,
    masked_lm,
)
from manyformer.recipes.parts.keywords import BlockLength, Default, PositiveSize
from manyformer.recipes.parts.registry import recipe

PAPER = "Tay et al. 2020, Sparse Sinkhorn Attention, arXiv:2002.11296"
SUMMARY = "A learned matrix, nearly a permutation, sorts blocks, so that local attention reaches distant ones."

TINY = {"block": 4}

SinkhornIterations = Annotated[
    PositiveSize | None, "number of Sinkhorn normalizations of rows and columns; null means that only rows sum to one"
]


class SinkhornOptions(TypedDict, total=False):
    """The keywords that both forms of the Sinkhorn Transformer share."""

    max_length: Annotated[int, Default(2048)]
    block: Annotated[BlockLength, Default(64)]
    sorting: Annotated[
        Literal["network", "products"],
        "how blocks are scored: by a learned network, or by products of block summaries",
        Default("network"),
    ]
    temperature: Annotated[
        float, "divides the block scores: the lower, the closer the sorting matrix is to a permutation", Default(0.75)
    ]
    gumbel_noise: Annotated[float, "scale of the Gumbel noise added to block scores in training", Default(1.0)]
    mix_with: Annotated[
        Literal["none", "softmax"],
        "attention added to the sorted one, with the same queries, keys and values",
        Default("none"),
    ]
    norm_order: Annotated[NormOrder, Default("pre")]


@recipe(
    "Sinkhorn Transformer",
    paper=PAPER,
    summary=SUMMARY,
    task=LANGUAGE_MODELLING,
    family="clustered",
    cost="O(l block d + l^2 d / block + l d^2) per layer; with mix_with=softmax O(l^2 d)",
    reasons={
        "attention_dropout": "blocks are mixed before tokens attend to them",
        "pair_weights": "blocks are mixed before tokens attend to them",
    },
    tiny_keywords=TINY,
)
def sinkhorn_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    sinkhorn_iterations: SinkhornIterations = None,
    dropout: float = 0.0,
    **options: Unpack[SinkhornOptions],
) -> LanguageModel:
    """Section 3.3: sorting assigns earlier blocks to a block, from its first token and the past; else `transformer-lm`.

    Balancing is off by default: among earlier blocks only, the one matrix whose rows and columns all sum to one assigns
    to every block the previous one, and `sinkhorn_iterations` converge to it. `sorting="network"` is the paper's, up to
    `max_length` tokens; "products" compares keys, with sinusoids and at any length. `mix_with="softmax"` adds standard
    attention of the same queries, keys and values (section 3.5)."""

    embed = _embedding(vocab, dim, dropout, options)
    layer = _layers(dim, heads, ff_dim, options, Causal(), sinkhorn_iterations)
    return language_model(embed, depth, layer, dropout=dropout, norm_order=options["norm_order"])


@recipe(
    "Sinkhorn encoder",
    paper=PAPER,
    summary=SUMMARY,
    task=MASKED_LM,
    family="clustered",
    cost="O(l block d + l^2 d / block + l d^2) per layer; with sortcut_blocks O(l sortcut_blocks block d + l d^2)",
    reasons={
        "causal": "a block can be assigned a later one; `sinkhorn-transformer` is the causal recipe",
        "incremental_decoding": "a later token changes the sorting of all blocks, so no state can be cached",
        "attention_dropout": "blocks are mixed before tokens attend to them",
        "pair_weights": "blocks are mixed before tokens attend to them",
    },
    tiny_keywords=TINY,
)
def sinkhorn_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    ff_dim: int | None = None,
    sinkhorn_iterations: SinkhornIterations = 8,
    sortcut_blocks: Annotated[
        PositiveSize | None,
        "number of sorted blocks that all tokens attend to (SortCut); null means one sorted block for each block",
    ] = None,
    dropout: float = 0.1,
    **options: Unpack[SinkhornOptions],
) -> MaskedLM:
    """Sections 3.1, 3.2 and 3.4, for masked tokens: sorting over all blocks, balanced by `sinkhorn_iterations`.

    With `sortcut_blocks` every token attends only to that many sorted blocks (SortCut). The other keywords are those of
    `sinkhorn-transformer`."""

    embed = _embedding(vocab, dim, dropout, options)
    layer = _layers(dim, heads, ff_dim, options, AllKeys(), sinkhorn_iterations, sortcut_blocks)
    return masked_lm(embed, depth, layer, dropout=dropout, norm_order=options["norm_order"])


def _embedding(vocab: int, dim: int, dropout: float, options: SinkhornOptions) -> TokenEmbedding:
    """Learned positions for a sorting network, which is limited to a number of blocks; products allow any length."""
    if options["sorting"] == "network":
        position: AddedPosition = "learned"
    else:
        position = "sinusoid"
    return embedding_with(position, vocab, dim, options["max_length"], dropout=dropout)


def _layers(
    dim: int,
    heads: int,
    ff_dim: int | None,
    options: SinkhornOptions,
    mask: Mask,
    iterations: int | None,
    sortcut_blocks: int | None = None,
) -> LayerMaker:
    """Layers with Sinkhorn attention, or its sum with standard attention."""
    block = options["block"]
    causal = mask == Causal()

    def kernel(number: int) -> Kernel:
        if options["sorting"] == "network":
            # a network maps a block's mean to scores of all blocks, so it knows a fixed number of them
            sorting: SortingNetwork = MLPSorting(heads, dim // heads, -(-options["max_length"] // block), causal=causal)
        else:
            sorting = BilinearSorting(heads, dim // heads, causal=causal)
        sinkhorn = SinkhornKernel(
            sorting,
            block,
            mask,
            temperature=options["temperature"],
            iterations=iterations,
            # noise makes training try other assignments than the likeliest (section 3.2)
            gumbel_noise=options["gumbel_noise"],
            sortcut_blocks=sortcut_blocks,
        )
        if options["mix_with"] == "none":
            return sinkhorn
        # two kernels on the same queries, keys and values: their outputs are added (section 3.5)
        return SumKernel(sinkhorn, SoftmaxKernel(mask))

    return attention_layers(dim, heads, ff_dim, kernel)
