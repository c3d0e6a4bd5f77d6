"""FlexAttention on CUDA under any mask.

It is compiled for each mask with `fullgraph`: a call that cannot be compiled raises instead of running slowly. On a CPU
there is no gradient; the eager form is used there to test the block masks.
"""

from jaxtyping import Float
from torch import Tensor

from manyformer.core import TokenPositions
from manyformer.masks import Mask
from manyformer.ops.flex_bias_attention import fused_flex_attention
from manyformer.ops.flex_block_mask import block_mask


def flex_mask_attention(
    q: Float[Tensor, "b h l e"],
    k: Float[Tensor, "b g s e"],
    v: Float[Tensor, "b g s f"],
    mask: Mask,
    query_positions: TokenPositions,
    key_positions: TokenPositions,
    *,
    scale: float,
) -> Float[Tensor, "b h l f"]:
    """Softmax attention under `mask` within segments; a query that sees no key gets zeros."""
    blocks = block_mask(mask, query_positions, key_positions, q.shape[1])
    return fused_flex_attention(q, k, v, block_mask=blocks, scale=scale)
