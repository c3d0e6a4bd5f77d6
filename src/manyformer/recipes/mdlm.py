"""MDLM: a language model by masked diffusion, whose tokens are predicted in any order."""

from manyformer.models import MaskedDiffusionLM
from manyformer.models.noise import MDLM_SCHEDULE
from manyformer.models.tasks.masked_diffusion import MASKED_DIFFUSION
from manyformer.recipes.parts.diffusion_parts import MaskToken, gelu_encoder
from manyformer.recipes.parts.registry import recipe


@recipe(
    "MDLM",
    paper="Sahoo et al. 2024, Simple and Effective Masked Diffusion Language Models, arXiv:2406.07524",
    summary="An encoder predicts masked tokens at every rate of masking: a language model that fills in any order.",
    task=MASKED_DIFFUSION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer",
)
def mdlm(
    vocab: int = 256,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    mask_token: MaskToken = 4,
) -> MaskedDiffusionLM:
    """As large as the paper's small model by default, with the log-linear schedule and SUBS (section 3.2.3).

    The released layers are those of DiT, which a time that is always 0 modulates: a scale, a shift and a gate of each
    layer that do not depend on the input. They are left out here. Noise levels are stratified over the rows of a batch,
    as there."""
    parts = gelu_encoder(vocab, dim, depth, heads, ff_dim, dropout)
    return MaskedDiffusionLM(*parts, MDLM_SCHEDULE, mask_token=mask_token)
