"""LLaDA: Llama without its causal mask, trained by masked diffusion."""

from functools import partial

from manyformer.models import MaskedDiffusionLM
from manyformer.models.noise import LLADA_SCHEDULE
from manyformer.models.tasks.masked_diffusion import MASKED_DIFFUSION
from manyformer.nn.attention.attention import Attention
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.feedforward import GatedFeedForward
from manyformer.nn.positions import RotaryPosition
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.recipes.parts.baselines import check_heads
from manyformer.recipes.parts.diffusion_parts import MaskToken, diffusion_encoder
from manyformer.recipes.parts.keywords import NormEps, RopeBase
from manyformer.recipes.parts.registry import recipe


@recipe(
    "LLaDA",
    paper="Nie et al. 2025, Large Language Diffusion Models, arXiv:2502.09992",
    summary="Llama without its causal mask, trained to predict masked tokens at every rate of masking.",
    task=MASKED_DIFFUSION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
)
def llada(
    vocab: int = 32000,
    dim: int = 512,
    depth: int = 8,
    heads: int = 8,
    ff_dim: int | None = None,
    dropout: float = 0.0,
    mask_token: MaskToken = 4,
    rope_base: RopeBase = 10_000.0,
    norm_eps: NormEps = 1e-6,
) -> MaskedDiffusionLM:
    """As small as `llama` by default; 8B has dim=4096, depth=32, heads=32, ff_dim=12288, rope_base=500000.

    Sections 2.1 and 2.2. Every head has its own keys and values. Noise levels are stratified over the rows of a batch
    where those of the paper are independent, which changes no mean; where one batch in a hundred of the paper has
    shorter rows, those of a run are as long as its documents. The loss is divided by the number of tokens that can be
    masked, in the paper by that of all positions: the same in rows without padding. Not included is the tuning on
    prompts with answers."""
    check_heads(dim, heads)
    rotary = RotaryPosition(dim // heads, pairs="halves", base=rope_base)

    def layer(number: int) -> dict[str, Layer]:
        attention = Attention(dim, heads, SoftmaxKernel(), position=rotary, bias=False)
        return {"attention": attention, "ff": GatedFeedForward(dim, ff_dim)}

    parts = diffusion_encoder(vocab, dim, depth, layer, partial(RMSNorm, dim, norm_eps), dropout)
    return MaskedDiffusionLM(*parts, LLADA_SCHEDULE, mask_token=mask_token)
