"""Mathematical properties of attention, measured: convex hull, equivariance, asymmetry, rank, variance of scores.

`attention_properties` measures every layer of a model for one input; each measure of one call of a kernel is a function
of its own, and none needs attention weights."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.models import Model
from manyformer.models.model import eval_mode
from manyformer.models.tasks import Inputs
from manyformer.nn.attention.attention import Attention, named_attention
from manyformer.nn.attention.head_gates import part_name
from manyformer.nn.core import tree_map
from manyformer.nn.kernels.kernel import Kernel, KernelCall, named_kernels
from manyformer.nn.runtime.devices import float64_device
from manyformer.recipes.parts.registry import task_of

ROUNDING = 1e-6
"""Below this a measured difference is rounding."""

DIRECTIONS = 64
"""Random directions in which outputs are compared with values."""


class AttentionProperties(NamedTuple):
    """What was measured of one attention layer; tuples have a number for each head.

    `hull_excess` is how far outputs lie outside of the convex hull of the values in some direction; `convex_weights`
    whether the weights are proof that they do not (None: it reports none). `permutation_error` is how much permuted
    tokens change the outputs beyond their order, `key_order_error` how much another order of keys and values does.
    `asymmetry` is that of q.k, `antisymmetric_share` that of W_Q W_K^T, `rank` that of q.k in the first row, at most
    `rank_bound`, the channels or the tokens if these are fewer, and `score_variance` the variance of q.k, which is
    `head_dim` for independent channels of variance 1.
    None: the layer has different queries and keys, or shares no such matrices."""

    part: str
    kernel: str
    hull_excess: tuple[float, ...]
    convex_weights: bool | None
    permutation_error: float | None
    key_order_error: float | None
    asymmetry: tuple[float, ...] | None
    antisymmetric_share: tuple[float, ...] | None
    rank: tuple[int, ...]
    rank_bound: int
    head_dim: int
    score_variance: tuple[float, ...]

    @property
    def in_convex_hull(self) -> bool:
        """Whether the outputs of all heads are convex combinations of the values, as far as was measured."""
        return max(self.hull_excess) <= ROUNDING and self.convex_weights is not False


class _RecordedCall(NamedTuple):
    call: KernelCall
    y: Tensor


def attention_properties(model: Model, inputs: Inputs, *, seed: int = 0) -> list[AttentionProperties]:
    """The properties of each layer whose attention is computed by a kernel, in the order of the model.

    Computed in float64 on a copy of the model, in evaluation mode and without a state; of a layer that is applied
    several times, the first time. `seed` draws directions and permutations. Layers without a kernel are left out."""
    # rounding of float32 would hide a small excess over the hull, or look like one
    model, inputs = _in_float64(model, inputs)
    layers = {part_name(name): layer for name, layer in named_attention(model).items()}
    with torch.no_grad(), eval_mode(model):
        with _recorded_calls(layers) as calls:
            task_of(model).call(model, inputs)
        return [_measure(name, layers[name], *recorded, seed=seed) for name, recorded in calls.items()]


def permutation_change(model: Model, inputs: Inputs, *, seed: int = 0) -> float:
    """How much the logits of permuted tokens differ from the permuted logits, relative to their norm.

    0 for a model without positions and masks. The tokens of a row with one prediction, such as a class, are permuted
    alone: pooling makes an equivariant model invariant. In float64; a source stays in order."""
    task = task_of(model)
    model, inputs = _in_float64(model, inputs)
    order = torch.randperm(inputs.tokens.shape[1], generator=torch.Generator().manual_seed(seed))
    with torch.no_grad(), eval_mode(model):
        logits = task.call(model, inputs).logits
        permuted = task.call(model, inputs._replace(tokens=inputs.tokens[:, order])).logits
    expected = logits[:, order] if task.per_token else logits
    return float((permuted - expected).norm() / expected.norm())


def _in_float64(model: Model, inputs: Inputs) -> tuple[Model, Inputs]:
    """A copy of the model in float64, and the inputs; both on the CPU where the device of the model has no float64."""
    device = float64_device(model.device)
    moved: Inputs = tree_map(lambda tensor: tensor.to(device), inputs)
    return copy.deepcopy(model).to(device).double(), moved


def _measure(part: str, layer: Attention, call: KernelCall, y: Tensor, *, seed: int) -> AttentionProperties:
    generator = torch.Generator().manual_seed(seed)
    queries = call.q.shape[2]
    keys = call.k.shape[2]
    scores = dot_products(call.q, call.k)
    is_square = queries == keys
    order = torch.randperm(keys, generator=generator)
    has_own_keys = is_square and layer.key_origin == "stream"
    # a recurrent kernel has a mask, but no cache to evict keys from
    mask = getattr(layer.kernel, "mask", layer.kernel.cache_mask)
    is_causal = has_own_keys and mask is not None and mask.causal
    return AttentionProperties(
        part=part,
        kernel=type(layer.kernel).__name__,
        hull_excess=tuple(convex_hull_excess(call.v, y, generator, causal=is_causal).tolist()),
        convex_weights=weights_are_convex(layer.kernel, call, y),
        permutation_error=permutation_error(layer.kernel, call, order, y) if has_own_keys else None,
        key_order_error=None if layer.kernel.tied_qk else key_order_error(layer.kernel, call, order, y),
        asymmetry=tuple(asymmetry(scores).tolist()) if has_own_keys else None,
        antisymmetric_share=_antisymmetric_share(layer) if has_own_keys else None,
        rank=tuple(torch.linalg.matrix_rank(scores[0]).tolist()),
        rank_bound=min(call.k.shape[-1], queries, keys),
        head_dim=call.k.shape[-1],
        score_variance=tuple(scores.transpose(0, 1).flatten(1).var(1).tolist()),
    )


def _antisymmetric_share(layer: Attention) -> tuple[float, ...]:
    groups = layer.key_heads
    head_dim = layer.kv_shape.head_dim
    k_weight = layer.kv_proj.weight[: groups * head_dim].unflatten(0, (groups, head_dim))  # type: ignore[no-untyped-call]
    q_weight = k_weight
    if layer.q_proj is not None:
        query_dim = head_dim + layer.kernel.extra_query_dim
        q_weight = layer.q_proj.weight.unflatten(0, (-1, query_dim))[:, :head_dim]  # type: ignore[no-untyped-call]
    k_weight = k_weight.repeat_interleave(len(q_weight) // groups, dim=0)
    return tuple(antisymmetric_share(q_weight, k_weight).tolist())


@contextmanager
def _recorded_calls(layers: Mapping[str, Attention]) -> Iterator[dict[str, _RecordedCall]]:
    """The first call of the kernel of each layer inside the block."""
    calls: dict[str, _RecordedCall] = {}
    with ExitStack() as hooks:
        for name, layer in layers.items():

            def record(module: nn.Module, args: tuple[Any, ...], output: Any, name: str = name) -> None:
                # a layer that is applied several times is measured at its first call
                calls.setdefault(name, _RecordedCall(args[0], output.y))

            hooks.enter_context(layer.kernel.register_forward_hook(record))
        yield calls


def convex_hull_excess(
    v: Float[Tensor, "b g s f"], y: Float[Tensor, "b h l f"], generator: torch.Generator, *, causal: bool
) -> Float[Tensor, " h"]:
    """How far the outputs of each head lie outside of the convex hull of its values, in random directions.

    In a direction u no convex combination y exceeds the largest u.v, of the values up to the query if `causal`. The
    largest excess over all queries and directions, divided by the largest |u.v|: 0 up to rounding where the outputs are
    weighted means of the values."""
    # values may carry channels for the kernel alone behind those of the outputs
    v = v[..., : y.shape[-1]].repeat_interleave(y.shape[1] // v.shape[1], dim=1)
    directions = torch.randn(y.shape[-1], DIRECTIONS, generator=generator, dtype=torch.float64).to(y)
    values = v @ directions
    outputs = y @ directions
    if causal:
        # a causal query may only combine the values up to its own
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
    # weights of slots that mix tokens say nothing of single values
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
