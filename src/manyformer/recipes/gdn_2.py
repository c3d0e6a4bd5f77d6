"""Gated DeltaNet-2: the delta rule with one gate for what it erases and another for what it writes, by channels."""

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim, NegativeEigenvalues, ShortConvolutionSize, ValueDim
from manyformer.recipes.parts.recurrent_layers import CORRECTED_MEMORY, RecurrentSizes, erase_write_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "Gated DeltaNet-2",
    paper="Hatamizadeh et al. 2026, Gated DeltaNet-2: Decoupling Erase and Write in Linear Attention, arXiv:2605.22791",
    summary="Kimi Delta Attention with separate gates for the channels of a key that erase and of a value that are "
    "written.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons=CORRECTED_MEMORY,
    tiny_keywords={"value_dim": 4},
)
def gdn_2(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    value_dim: ValueDim = None,
    ff_dim: int | None = None,
    conv_size: ShortConvolutionSize = 4,
    dropout: float = 0.0,
    *,
    negative_eigenvalues: NegativeEigenvalues = False,
) -> LanguageModel:
    """Kimi Delta Attention's convolution, decay and output gate, whose strength of corrections is two gates here.

    The gates are matrices of the stream. With `negative_eigenvalues` those that erase reach 2, those that write 1."""
    sizes = RecurrentSizes.of(dim, heads, head_dim, value_dim)
    # see `deltanet`: to erase more than is read gives the transition a negative eigenvalue
    max_strength = 2.0 if negative_eigenvalues else 1.0

    def layer(number: int) -> dict[str, Layer]:
        attention = erase_write_attention(sizes, conv_size=conv_size, max_strength=max_strength)
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)
