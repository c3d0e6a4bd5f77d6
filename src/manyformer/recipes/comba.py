"""Comba: Gated DeltaNet whose corrections read the memory with a weaker key than the one that writes."""

from typing import Annotated

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim, ShortConvolutionSize, ValueDim
from manyformer.recipes.parts.recurrent_layers import CORRECTED_MEMORY, RecurrentSizes, feedback_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Comba",
    paper="Hu et al. 2025, Comba: Improving Bilinear RNNs with Closed-loop Control, arXiv:2506.02475",
    summary="Gated DeltaNet that corrects with a learned share of the key, and corrects its queries too.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons=CORRECTED_MEMORY,
    tiny_keywords={"value_dim": 4},
)
def comba(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    value_dim: ValueDim = None,
    ff_dim: int | None = None,
    conv_size: ShortConvolutionSize = 4,
    initial_correction: Annotated[float, "factor at first by which weaker keys are taken off queries"] = 1.0,
    dropout: float = 0.0,
) -> LanguageModel:
    """Gated DeltaNet's layer with the formula of the paper, in which released code cancels the share of the key.

    The share of each head begins at sigmoid(1)."""
    sizes = RecurrentSizes.of(dim, heads, head_dim, value_dim)

    def layer(number: int) -> dict[str, Layer]:
        attention = feedback_attention(sizes, conv_size=conv_size, initial_correction=initial_correction)
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)
