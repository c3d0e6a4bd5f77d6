"""Gated DeltaProduct: several steps of the delta rule for each token, so that a memory can be rotated."""

from typing import Annotated

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim, NegativeEigenvalues, PositiveSize, ShortConvolutionSize, ValueDim
from manyformer.recipes.parts.recurrent_layers import CORRECTED_MEMORY, RecurrentSizes, delta_product_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Gated DeltaProduct",
    paper="Siems et al. 2025, DeltaProduct: Improving State-Tracking in Linear RNNs via Householder Products, "
    "arXiv:2502.10297",
    summary="Gated DeltaNet with several keys and values of a token, which correct the memory one after another.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(steps l d^2) per layer; O(steps d^2 / heads) per generated token, at any length",
    reasons=CORRECTED_MEMORY,
    tiny_keywords={"value_dim": 4},
)
def deltaproduct(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    value_dim: ValueDim = None,
    ff_dim: int | None = None,
    conv_size: ShortConvolutionSize = 4,
    householder_steps: Annotated[PositiveSize, "corrections of the memory by each token; 1 is Gated DeltaNet"] = 2,
    dropout: float = 0.0,
    *,
    negative_eigenvalues: NegativeEigenvalues = True,
) -> LanguageModel:
    """Section 3, with the decay of Gated DeltaNet once a token: two reflections of a memory make a rotation.

    Rates of decays begin in [1, 16], not in [0, 16], where a rate of 0 has no logarithm."""
    sizes = RecurrentSizes.of(dim, heads, head_dim, value_dim)
    # strengths up to 1 only shrink the memory along a key, up to 2 they reflect it
    max_strength = 2.0 if negative_eigenvalues else 1.0

    def layer(number: int) -> dict[str, Layer]:
        attention = delta_product_attention(sizes, householder_steps, conv_size=conv_size, max_strength=max_strength)
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)
