"""Which positions, heads and convolutions a kernel of attention can be combined with, and why not others."""

from manyformer.kernels import Kernel
from manyformer.masks import Causal
from manyformer.position import Position


def check_position(position: Position, kernel: Kernel) -> None:
    """Raise ValueError for a position encoding that this kernel cannot apply."""
    conflict = f"{type(kernel).__name__} does not support"
    encoding = type(position).__name__
    if missing := position.required_seams() - {"embed"} - kernel.supports:
        raise ValueError(f"{conflict} {sorted(missing)}, which {encoding} needs")
    if position.uses_positive_scores and kernel.scores_at_most_zero:
        raise ValueError(f"{conflict} {encoding}, which drops scores below 0: no score of this kernel is above 0")
    if position.needs_every_key and kernel.cache_mask != Causal():
        reason = f"which compares a query with every earlier token: only a softmax with the mask {Causal()!r} does"
        raise ValueError(f"{conflict} {encoding}, {reason}")


def check_key_heads(kernel: Kernel, key_heads: int, kv_heads: int, heads: int) -> None:
    """Raise ValueError for numbers of heads of queries and keys that `heads` of values cannot share."""
    if key_heads == kv_heads:
        return
    if kv_heads != heads or key_heads < 1 or heads % key_heads:
        raise ValueError(f"heads ({heads}) must be a multiple of key_heads ({key_heads}), without kv_heads")
    if kernel.tied_qk or kernel.extra_query_dim:
        raise ValueError(f"{type(kernel).__name__} needs as many key_heads ({key_heads}) as heads ({heads})")


def check_convolved_kernel(kernel: Kernel, *, uses_own_source: bool) -> None:
    """Raise ValueError for a kernel whose queries, keys and values cannot be convolved together."""
    if kernel.tied_qk or not uses_own_source:
        raise ValueError("a short convolution mixes queries and keys of the same tokens: it needs self-attention")
    if kernel.gate_dim and kernel.gate_projection is None:
        raise ValueError(f"the gates of {type(kernel).__name__} must not be convolved: it needs a gate_projection")
