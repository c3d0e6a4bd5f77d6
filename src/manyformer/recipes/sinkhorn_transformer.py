"""The Sinkhorn Transformer: each block of tokens sees itself and a block that a learned sorting puts beside it."""

from typing import Literal

from manyformer.kernels import Kernel, Sinkhorn, Softmax, Together
from manyformer.kernels.sorting import Network, Products, Sorting
from manyformer.masks import Causal, Mask
from manyformer.models import LanguageModel, MaskedLM
from manyformer.recipes.alike import Added, added, language_model, masked_lm
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder

PAPER = "Tay et al. 2020, Sparse Sinkhorn Attention, arXiv:2002.11296"
NEW = "Blocks are sorted by a matrix that is learned and nearly a permutation: what is far away comes to stand beside."
SMALL = {"block": 4}

Sorted = Literal["network", "products"]
Mixture = Literal["none", "softmax"]

POSITIONS: dict[Sorted, Added] = {"network": "learned", "products": "sinusoid"}
"""A network is for up to so many blocks, and so are its positions; products are for any length."""


@recipe(
    "Sinkhorn Transformer",
    paper=PAPER,
    new=NEW,
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l block d + l^2 d / block + l d^2) per layer; with mixture=softmax O(l^2 d)",
    because={"cross": "a language model reads one sequence only"},
    small=SMALL,
)
def sinkhorn_transformer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    longest: int = 2048,
    block: int = 64,
    sorting: Sorted = "network",
    temperature: float = 0.75,
    steps: int | None = None,
    noise: float = 1.0,
    mixture: Mixture = "none",
    dropout: float = 0.0,
    norm: NormOrder = "pre",
) -> LanguageModel:
    """Section 3.3: a block is given earlier blocks, by what is known at its first token; otherwise as `transformer-lm`.

    Balancing is off unless `steps` says how often: among earlier blocks only, the one matrix whose rows and columns all
    sum to one gives every block the one before it, and balancing goes there. `sorting="network"` is the paper's, up to
    `longest` tokens; "products" compares keys, with sinusoids and for any length. `mixture="softmax"` adds vanilla
    attention of the same queries, keys and values (section 3.5).
    """

    def kernel() -> Kernel:
        net = _network(sorting, heads, dim // heads, -(-longest // block), causal=True)
        sinkhorn = Sinkhorn(net, block, Causal(), temperature=temperature, steps=steps, noise=noise)
        return _mixed(sinkhorn, Causal(), mixture)

    embed = added(POSITIONS[sorting], vocab, dim, longest, dropout=dropout)
    return language_model(embed, depth, heads, hidden, kernel, dropout=dropout, norm=norm)


@recipe(
    "Sinkhorn encoder",
    paper=PAPER,
    new=NEW,
    task="masked",
    cost="O(l block d + l^2 d / block + l d^2) per layer; with cut O(l cut block d + l d^2)",
    because={
        "causal": "every block may be given a later one; `sinkhorn-transformer` is the causal one",
        "streams": "a later token changes how all blocks are sorted, so nothing can be kept",
        "cross": "it reads one sequence only",
    },
    small=SMALL,
)
def sinkhorn_encoder(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 6,
    heads: int = 8,
    hidden: int | None = None,
    longest: int = 2048,
    block: int = 64,
    sorting: Sorted = "network",
    temperature: float = 0.75,
    steps: int | None = 8,
    noise: float = 1.0,
    cut: int | None = None,
    mixture: Mixture = "none",
    dropout: float = 0.1,
    norm: NormOrder = "pre",
) -> MaskedLM:
    """Sections 3.1, 3.2 and 3.4, for masked tokens: blocks are sorted among all blocks, balanced in `steps` steps.

    With `cut` every token sees the first so many sorted blocks alone (SortCut). The other keywords are those of
    `sinkhorn-transformer`.
    """

    def kernel() -> Kernel:
        net = _network(sorting, heads, dim // heads, -(-longest // block), causal=False)
        sinkhorn = Sinkhorn(net, block, temperature=temperature, steps=steps, noise=noise, cut=cut)
        return _mixed(sinkhorn, None, mixture)

    embed = added(POSITIONS[sorting], vocab, dim, longest, dropout=dropout)
    return masked_lm(embed, depth, heads, hidden, kernel, dropout=dropout, norm=norm)


def _network(sorting: Sorted, heads: int, key: int, blocks: int, *, causal: bool) -> Sorting:
    return Network(heads, key, blocks, causal=causal) if sorting == "network" else Products(heads, key, causal=causal)


def _mixed(sinkhorn: Sinkhorn, mask: Mask | None, mixture: Mixture) -> Kernel:
    """Sorted blocks alone, or vanilla attention added."""
    return sinkhorn if mixture == "none" else Together(sinkhorn, Softmax(mask))
