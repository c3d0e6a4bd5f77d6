"""RoFormer: BERT with rotary position embeddings in its attention."""

from manyformer.models import MaskedLM
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.bert import masked_encoder
from manyformer.recipes.parts.registry import recipe


@recipe(
    "RoFormer",
    paper="Su et al. 2021, RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864",
    summary="Queries and keys are rotated by an angle proportional to position, so scores depend on distances alone.",
    task=MASKED_LM,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
)
def roformer(
    vocab: int = 30522,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    dropout: float = 0.1,
) -> MaskedLM:
    """BERT base with rotary positions in every layer instead of learned ones, and so without a maximum length.

    Sections 3.2 and 4.2; the rotated pairs are neighboring channels, as in the paper and the released models. Not
    included is what `bert` does not include either. The causal form, a language model, is `compose` with
    `position="rope"`."""
    # angles have no weights, so that one module serves all layers
    rotary = RotaryPosition(dim // heads)

    def attention(number: int) -> Layer:
        return Attention(dim, heads, SoftmaxKernel(), position=rotary)

    return masked_encoder(vocab, dim, depth, heads, ff_dim, dropout, make_attention=attention)
