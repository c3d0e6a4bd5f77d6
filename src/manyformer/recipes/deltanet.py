"""DeltaNet: linear attention whose tokens replace what the memory returns for their key, in parallel over the text."""

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage, SharedHeadNorm
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim, NegativeEigenvalues, ShortConvolutionSize
from manyformer.recipes.parts.recurrent_layers import CORRECTED_MEMORY, RecurrentSizes, delta_attention
from manyformer.recipes.parts.registry import recipe


@recipe(
    "DeltaNet",
    paper="Yang et al. 2024, Parallelizing Linear Transformers with the Delta Rule over Sequence Length, "
    "arXiv:2406.06484",
    summary="The delta rule of fast weights over keys of length 1, in chunks whose corrections solve a triangular "
    "system.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons=CORRECTED_MEMORY,
)
def deltanet(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    conv_size: ShortConvolutionSize = 4,
    dropout: float = 0.0,
    *,
    negative_eigenvalues: NegativeEigenvalues = False,
) -> LanguageModel:
    """Section 3: SiLU of convolved queries, keys and values, keys and queries of length 1, a norm of each output.

    Other than `linear-transformer` with `update_rule=delta`, which has Schlag's features of sum 1, no convolution and
    sinusoids. `negative_eigenvalues` doubles the strength of corrections (Grazzi et al. 2024, arXiv:2411.12537)."""
    # keys and values have one width, so the memory of a head is a square matrix
    sizes = RecurrentSizes.of(dim, heads, head_dim, head_dim)
    # the memory's transition I - beta k k^T has the eigenvalue 1 - beta, which beta above 1 makes negative
    max_strength = 2.0 if negative_eigenvalues else 1.0

    def layer(number: int) -> dict[str, Layer]:
        attention = plain_delta_attention(sizes, conv_size=conv_size, max_strength=max_strength)
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)


def plain_delta_attention(sizes: RecurrentSizes, *, conv_size: int, max_strength: float) -> Attention:
    """DeltaNet's layer (section 3): the delta rule without a decay, and a norm of each head's output."""
    # a norm without a gate: its gain serves all heads
    stage = GatedNormStage(SharedHeadNorm(sizes.value_dim))
    return delta_attention(sizes, None, stage, conv_size=conv_size, max_strength=max_strength)
