"""RoFormer: BERT whose attention knows distances, because queries and keys turn with their positions."""

from manyformer.models import MaskedLM
from manyformer.position import RotaryPosition
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.registry import recipe


@recipe(
    "RoFormer",
    paper="Su et al. 2021, RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864",
    summary="Queries and keys turn by an angle that grows with their position: their product knows the distance alone.",
    task="masked",
    cost="O(l^2 d + l d^2) per layer",
    reasons={
        "causal": "every token sees both sides: that is the point",
        "incremental_decoding": "a later token changes all earlier outputs, so nothing can be kept",
        "cross_attention": "it reads one sequence only",
    },
)
def roformer(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    dropout: float = 0.1,
) -> MaskedLM:
    """BERT base with rotary positions in every layer instead of learned ones, and so without a longest sequence.

    Sections 3.2 and 4.2; the pairs are neighbouring channels, as in the paper and the released models. Left out is what
    `bert` leaves out, too. The causal form, a language model, is `compose` with `position="rope"`.
    """
    rotary = RotaryPosition(dim // heads)
    return masked_encoder(vocab, dim, depth, heads, ff_dim, dropout, attended=lambda: rotary)
