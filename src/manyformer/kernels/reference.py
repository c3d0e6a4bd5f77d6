"""Softmax attention of a kernel call by its definition."""

from jaxtyping import Bool, Float
from torch import Tensor

from manyformer.kernels.kernel import KernelCall
from manyformer.ops.softmax_attention import softmax_attention_reference


def softmax_call_reference(
    call: KernelCall, mask: Bool[Tensor, "#b #h l s"], *, scale: float, dropout: float = 0.0
) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
    """Outputs and weights of all pairs that the mask shows."""
    return softmax_attention_reference(
        call.q,
        call.k,
        call.v,
        mask,
        scale=scale,
        dropout=dropout,
        position=call.position,
        query_positions=call.query_positions,
        key_positions=call.key_positions,
    )
