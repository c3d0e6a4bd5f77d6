"""Gated DeltaNet: the delta rule over a memory that each head decays before it corrects it."""

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim, KeyHeads, NegativeEigenvalues, ShortConvolutionSize, ValueDim
from manyformer.recipes.parts.recurrent_layers import CORRECTED_MEMORY, RecurrentSizes, gated_delta_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Gated DeltaNet",
    paper="Yang et al. 2024, Gated Delta Networks: Improving Mamba2 with Delta Rule, arXiv:2412.06464",
    summary="Mamba-2's decay of each head, then the delta rule: a memory that can be cleared and precisely corrected.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons={**CORRECTED_MEMORY, "removable_heads": "with fewer `key_heads`, heads share keys"},
    tiny_keywords={"key_heads": 1, "value_dim": 4},
)
def gated_deltanet(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    key_heads: KeyHeads = None,
    head_dim: HeadDim = None,
    value_dim: ValueDim = None,
    ff_dim: int | None = None,
    conv_size: ShortConvolutionSize = 4,
    dropout: float = 0.0,
    *,
    negative_eigenvalues: NegativeEigenvalues = False,
) -> LanguageModel:
    """Section 3.4: DeltaNet's layer, decays of Mamba-2, and a SiLU gate of each head's normalized output.

    `key_heads` below `heads` are those of Qwen3-Next, `negative_eigenvalues` those of OLMo hybrid."""
    sizes = RecurrentSizes.of(dim, heads, head_dim, value_dim, key_heads)
    # see `deltanet`: a strength above 1 gives the transition a negative eigenvalue
    max_strength = 2.0 if negative_eigenvalues else 1.0

    def layer(number: int) -> dict[str, Layer]:
        attention = gated_delta_attention(sizes, conv_size=conv_size, max_strength=max_strength)
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)
