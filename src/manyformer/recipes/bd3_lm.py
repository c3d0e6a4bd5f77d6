"""BD3-LM: masked diffusion within blocks, which follow one another as the tokens of a causal model do."""

from typing import Annotated

from annotated_types import Gt, Le

from manyformer.base.errors import UserError
from manyformer.models import BlockDiffusionLM
from manyformer.models.noise import LEAST_LEVEL, NoiseSchedule
from manyformer.models.tasks.masked_diffusion import BLOCK_DIFFUSION
from manyformer.nn.masks import BlockCausal
from manyformer.recipes.parts.diffusion_parts import MaskToken, gelu_encoder
from manyformer.recipes.parts.keywords import BlockLength
from manyformer.recipes.parts.registry import recipe

MaskRate = Annotated[float, Gt(0), Le(1)]


@recipe(
    "BD3-LM",
    paper="Arriola et al. 2025, Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models, "
    "arXiv:2503.09573",
    summary="Blocks follow one another, the tokens of a block are predicted in any order; finished blocks are cached.",
    task=BLOCK_DIFFUSION,
    family="softmax",
    cost="O(l^2 d + l d^2) per layer, of 2 l tokens in training",
)
def bd3_lm(
    vocab: int = 256,
    dim: int = 768,
    depth: int = 12,
    heads: int = 12,
    ff_dim: int | None = None,
    dropout: float = 0.1,
    block: BlockLength = 4,
    mask_token: MaskToken = 4,
    lowest_rate: Annotated[MaskRate, "lowest rate of masking in training"] = LEAST_LEVEL,
    highest_rate: Annotated[MaskRate, "highest rate of masking in training"] = 1.0,
) -> BlockDiffusionLM:
    """MDLM's encoder with `block` tokens in a block; 1 is a causal model, if `lowest_rate` is 1 without its variance.

    Sections 3 and 5. A narrower range, such as 0.3 to 0.8 for blocks of 4, lets the loss vary less; the paper searches
    it during training, and here it is fixed. Scores always are over all rates.
    Raises UserError for rates that are no range."""
    if lowest_rate > highest_rate:
        raise UserError(f"lowest_rate ({lowest_rate}) must be at most highest_rate ({highest_rate})")
    parts = gelu_encoder(vocab, dim, depth, heads, ff_dim, dropout, BlockCausal(block))
    schedule = NoiseSchedule(lowest_rate, highest_rate)
    return BlockDiffusionLM(*parts, schedule, mask_token=mask_token, block=block)
