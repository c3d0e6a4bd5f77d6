"""The Synthesizer: attention whose weights need no product of queries and keys."""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

from torch import nn

from manyformer.core import Layer
from manyformer.feedforward import FeedForward
from manyformer.masks import Causal
from manyformer.mixers import Dense, DotProduct, FactorizedDense, Fixed, Product, Scores, Synthesizer, Table
from manyformer.models import Head, LanguageModel
from manyformer.recipes.alike import learned
from manyformer.recipes.registry import recipe
from manyformer.recipes.stacks import NormOrder, shrink_outputs, small_std, stack

Kind = Literal[
    "dense", "random", "frozen", "factorized-dense", "factorized-random", "random+dense", "dense+dot", "random+dot"
]
RANK = 8
"""Numbers a position has in a factorized table (section 3.3 of the paper)."""


@recipe(
    "Synthesizer",
    paper="Tay et al. 2021, Synthesizer: Rethinking Self-Attention in Transformer Models, arXiv:2005.00743",
    new="Attention weights can come from the query alone, or be learned numbers that see no token at all.",
    task="language-model",
    causal=True,
    streams=True,
    cost="O(l^2 d + l d^2) per layer",
    because={"cross": "a language model reads one sequence only"},
)
def synthesizer(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    hidden: int | None = None,
    longest: int = 1024,
    scores: Kind = "random+dot",
    dropout: float = 0.0,
    norm: NormOrder = "pre",
) -> LanguageModel:
    """Sections 3.1 to 3.4; else as `transformer-lm`. `scores` tells where attention weights come from.

    "dense": the query alone; "random": a learned number for each pair of positions, "frozen" where it is drawn and
    stays; both also "factorized"; "dot": products of queries and keys, as usual. Those joined by + are mixed with
    shares that are learned, "random+dot" being the paper's best.
    """

    def layer() -> dict[str, Layer]:
        mixer = Synthesizer(dim, [SCORES[name](dim, heads, longest) for name in scores.split("+")], mask=Causal())
        return {"mixer": mixer, "ff": FeedForward(dim, hidden, activation=nn.GELU())}

    embed = learned(vocab, dim, longest, dropout=dropout)
    body = stack(depth, layer, order=norm, norm=partial(nn.LayerNorm, dim), dropout=dropout)
    shrink_outputs(body, depth, std=small_std(dim))
    return LanguageModel(embed, body, Head(dim, vocab, tied=embed.token))


def _flat(longest: int) -> float:
    """Glorot's deviation: weights start nearly equal."""
    return 1 / math.sqrt(longest)


SCORES: dict[str, Callable[[int, int, int], Scores]] = {
    "dense": Dense,
    "random": lambda dim, heads, longest: Fixed(Table(longest, heads=heads, std=_flat(longest))),
    # what is never trained must tell positions apart from the start
    "frozen": lambda dim, heads, longest: Fixed(Table(longest, heads=heads, std=1.0, trained=False)),
    "factorized-dense": FactorizedDense,
    "factorized-random": lambda dim, heads, longest: Fixed(Product(longest, RANK, heads=heads, std=_flat(longest))),
    "dot": lambda dim, heads, longest: DotProduct(dim, heads),
}
