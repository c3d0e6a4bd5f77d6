"""The next token of attention that keeps a memory of fixed size, with its look-ups done beforehand."""

from collections.abc import Callable

import torch
from torch import Tensor

from manyformer.attention import Attention, AttentionState
from manyformer.core import Context, ContiguousLayout, State
from manyformer.kernels import LinearKernel
from manyformer.kernels.linear_kernel import LinearState
from manyformer.kernels.memory_rules import TokenFeatures
from manyformer.masks import Causal

Map = Callable[[Tensor], Tensor]


def folds(layer: Attention) -> bool:
    """Whether a new token is all that the layer's memory takes in, and all heads have keys of their own."""
    kernel = layer.kernel
    return (
        type(kernel) is LinearKernel
        and kernel.mask == Causal()
        and kernel.path in ("auto", "recurrent")
        and layer.pre_norm is None
        and layer.heads == layer.kv_shape.kv_heads
    )


def fold(
    layer: Attention,
    to_q: Map,
    to_kv: Map,
    out: Map,
    general: Callable[[Tensor, Context, State], tuple[Tensor, State]],
) -> Callable[[Tensor, Context, State], tuple[Tensor, State]]:
    """One token a row goes on with the memory of its plain document; `general` does what is left."""
    kernel, heads = layer.kernel, layer.heads
    assert isinstance(kernel, LinearKernel)
    features, rule = kernel.features.forward, kernel.rule.forward
    gate_dim, chunk, floor = kernel.gate_dim, kernel.chunk, kernel.floor
    widths = [heads * layer.kv_shape.head_dim, heads * layer.kv_shape.value_dim]
    turned = layer.position if layer.position.required_seams() - {"embed"} else None

    def step(x: Tensor, ctx: Context, state: AttentionState) -> tuple[Tensor, State]:
        place, before = ctx.positions, state.kernel
        begun = isinstance(place.layout, ContiguousLayout) and not before.is_empty
        if not begun or x.shape[1] != 1 or torch.is_autocast_enabled(x.device.type):
            return general(x, ctx, state)
        rows, wide = x.shape[0], torch.promote_types(x.dtype, torch.float32)
        q, (k, v) = to_q(x), torch.split(to_kv(x), widths, dim=-1)
        # the very strides that the model itself has: products may be formed in another order with others
        q, k, v = (part.view(rows, 1, heads, -1).transpose(1, 2) for part in (q, k, v))
        if turned is not None:
            q, k = turned.query(q, place), turned.key(k, place)
        c, log = features(k.to(wide), place)
        v = v.to(wide)
        v, gate = torch.split(v, [v.shape[-1] - gate_dim, gate_dim], -1) if gate_dim else (v, None)
        tokens = TokenFeatures(features(q.to(wide), place).y, c, v, log, gate, None, None)
        y, memory, _ = rule(tokens, before.memory, form="recurrent", chunk=chunk, floor=floor)
        return out(y.to(x.dtype).transpose(1, 2).flatten(2)), AttentionState(
            state.source, LinearState(memory, place.segment_ids[:, -1])
        )

    return step
