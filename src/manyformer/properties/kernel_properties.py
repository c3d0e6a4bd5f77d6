"""Properties of one call of an attention kernel, each measured on its own: no weights are asked for."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.kernels import Kernel, KernelCall, named_kernels

ROUNDING = 1e-6
"""Below this a measured difference is rounding."""

DIRECTIONS = 64
"""Random directions in which outputs are compared with values."""


def convex_hull_excess(
    v: Float[Tensor, "b g s f"], y: Float[Tensor, "b h l f"], generator: torch.Generator, *, causal: bool
) -> Float[Tensor, " h"]:
    """How far the outputs of each head lie outside of the convex hull of its values, in random directions.

    In a direction u no convex combination y exceeds the largest u.v, of the values up to the query if `causal`. The
    largest excess over all queries and directions, divided by the largest |u.v|: 0 up to rounding where the outputs are
    weighted means of the values."""
    v = v[..., : y.shape[-1]].repeat_interleave(y.shape[1] // v.shape[1], dim=1)
    directions = torch.randn(y.shape[-1], DIRECTIONS, generator=generator, dtype=torch.float64).to(y)
    values = v @ directions
    outputs = y @ directions
    if causal:
        largest = values.cummax(2).values
    else:
        largest = values.amax(2, keepdim=True)
    scale = values.abs().amax((0, 2, 3)).clamp(min=torch.finfo(y.dtype).tiny)
    return (outputs - largest).clamp(min=0).amax((0, 2, 3)) / scale


def weights_are_convex(kernel: Kernel, call: KernelCall, y: Float[Tensor, "b h l f"]) -> bool | None:
    """Whether the weights that the kernel reports are at least 0 and add up to 1 for every query.

    Then they prove that the outputs are weighted means of the values. None for a kernel that reports no weights for
    pairs of tokens, or whose outputs are not their products with the values, as with positions that act on values."""
    reported: list[Tensor] = []

    def watch(module: nn.Module, name: str, value: Tensor) -> None:
        if name == "weights":
            reported.append(value)

    kernel(call._replace(watch=watch))
    if not reported or any(part.mixes_keys for part in named_kernels(kernel).values()):
        return None
    weights = reported[-1]
    v = call.v[..., : y.shape[-1]].repeat_interleave(y.shape[1] // call.v.shape[1], dim=1)
    if _relative_difference(weights @ v, y) > ROUNDING:
        return None
    return bool((weights.sum(-1) - 1).abs().max() <= ROUNDING) and bool(weights.min() >= -ROUNDING)


def permutation_error(kernel: Kernel, call: KernelCall, order: Tensor, y: Float[Tensor, "b h l f"]) -> float:
    """How much the outputs of permuted tokens differ from permuted outputs: the norm of the difference over that of y.

    Queries, keys and values are those of the same tokens in another `order`; the positions stay. Positions, causal and
    local masks break the equivariance of attention."""
    q, k, v = (x[:, :, order] for x in (call.q, call.k, call.v))
    permuted = kernel(call._replace(q=q, k=k, v=v)).y
    return _relative_difference(permuted, y[:, :, order])


def key_order_error(kernel: Kernel, call: KernelCall, order: Tensor, y: Float[Tensor, "b h l f"]) -> float:
    """How much the outputs change when keys and values take another `order` together, relative to their norm."""
    k, v = (x[:, :, order] for x in (call.k, call.v))
    return _relative_difference(kernel(call._replace(k=k, v=v)).y, y)


def dot_products(q: Float[Tensor, "b h l e"], k: Float[Tensor, "b g s e"]) -> Float[Tensor, "b h l s"]:
    """The scores q.k of all pairs, unscaled; channels of q beyond those of k are left out."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return q[..., : k.shape[-1]] @ keys.mT


def asymmetry(scores: Float[Tensor, "b h l l"]) -> Float[Tensor, " h"]:
    """||S - S^T|| / ||S|| in the Frobenius norm for each head: 0 if symmetric, sqrt(2) for independent scores."""
    difference: Tensor = (scores - scores.mT).square().sum((0, 2, 3)).sqrt()
    return difference / scores.square().sum((0, 2, 3)).sqrt().clamp(min=torch.finfo(scores.dtype).tiny)


def antisymmetric_share(q_weight: Float[Tensor, "h e d"], k_weight: Float[Tensor, "h e d"]) -> Float[Tensor, " h"]:
    """||(M - M^T) / 2|| / ||M|| for M = W_Q W_K^T of each head: 0 if symmetric, 1 if antisymmetric."""
    products = q_weight.mT @ k_weight
    size: Tensor = torch.linalg.matrix_norm(products).clamp(min=torch.finfo(products.dtype).tiny)
    share: Tensor = torch.linalg.matrix_norm(products - products.mT) / 2 / size
    return share


def _relative_difference(changed: Tensor, y: Tensor) -> float:
    return float((changed - y).norm() / y.norm().clamp(min=torch.finfo(y.dtype).tiny))
