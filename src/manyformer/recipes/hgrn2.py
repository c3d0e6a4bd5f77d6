"""HGRN2: gated linear attention whose keys are what the memory loses, with bounds of decays that rise by layer."""

from torch.nn import functional as F

from manyformer.models import LanguageModel
from manyformer.models.tasks.language_modelling import LANGUAGE_MODELLING
from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.output_stages import GatedNormStage, HeadGroupNorm
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.linear import ScaledFeatures
from manyformer.nn.linear.linear_kernel import LinearKernel
from manyformer.nn.linear.recurrent_rules import DecayBounds, TiedDecayRule
from manyformer.nn.masks import Causal
from manyformer.recipes.parts.baselines import rms_decoder
from manyformer.recipes.parts.keywords import HeadDim
from manyformer.recipes.parts.recurrent_layers import SIGNED_SUMS, RecurrentSizes
from manyformer.recipes.parts.registry import recipe


@recipe(
    "HGRN2",
    paper="Qin et al. 2024, HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904",
    summary="Keys are 1 minus the decay of each channel, and higher layers decay less: gated linear attention without "
    "keys of its own.",
    task=LANGUAGE_MODELLING,
    family="linear",
    constant_state=True,
    cost="O(l d^2) per layer; O(d^2 / heads) per generated token, at any length",
    reasons={**SIGNED_SUMS, "removable_heads": "one norm acts on the outputs of all heads"},
)
def hgrn2(
    vocab: int = 256,
    dim: int = 512,
    depth: int = 8,
    heads: int = 4,
    head_dim: HeadDim = None,
    ff_dim: int | None = None,
    dropout: float = 0.0,
) -> LanguageModel:
    """Section 3: SiLU of queries, and a norm over the outputs of all heads, without a gate.

    `head_dim` is the paper's state expansion, and the width of values too."""
    sizes = RecurrentSizes.of(dim, heads, head_dim, head_dim)
    # lower bounds of decays that rise from layer to layer, shared by all: upper layers remember longer
    bounds = DecayBounds(depth, heads, sizes.head_dim)

    def layer(number: int) -> dict[str, Layer]:
        return {"attention": tied_decay_attention(sizes, bounds, number), "ff": GatedFeedForward(dim, ff_dim)}

    return rms_decoder(vocab, dim, depth, layer, dropout=dropout)


def tied_decay_attention(sizes: RecurrentSizes, bounds: DecayBounds, number: int) -> Attention:
    """HGRN2's layer (section 3) of a number, counted from 0, by which `bounds` has a lower bound of its decays."""
    features = ScaledFeatures(sizes.head_dim**-0.5, F.silu)
    rule = TiedDecayRule(bounds, number)
    return Attention(
        sizes.dim,
        sizes.heads,
        # keys are 1 minus the decays, which the rule ties: what is forgotten makes room for what is written
        LinearKernel(features, Causal(), key_features=ScaledFeatures(), rule=rule),
        head_dim=sizes.head_dim,
        value_dim=sizes.value_dim,
        output_stage=GatedNormStage(HeadGroupNorm(sizes.heads, sizes.value_dim, 1)),
        bias=False,
    )
