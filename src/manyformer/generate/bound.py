"""The next token of every row, with all that can be looked up beforehand looked up.

For one token Python takes as long to reach the weights of a small model (attributes, hooks, records) as the processor
takes to use them. `bind` walks through a model once and returns nested functions that hold the weights and call torch.
They compute what the model itself computes for one token, bit by bit; what they do not know they call as it is.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyformer.attention import Attention, AttentionState
from manyformer.core import (
    Chain,
    Context,
    ContiguousLayout,
    Layer,
    MemorySequence,
    Pointwise,
    Residual,
    State,
    TokenPositions,
)
from manyformer.depth.early_exit_stack import EarlyExit
from manyformer.feedforward import FeedForward, GatedFeedForward
from manyformer.generate.folded import fold, folds
from manyformer.generate.leaving import Tools, leaving
from manyformer.generate.protocol import ContinuesText, TranslatesText
from manyformer.generate.seen import Seen
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import AllKeys, Causal
from manyformer.masks.eviction import is_never_evicted
from manyformer.models import ClassHead, EncoderDecoder, LanguageModel, OutputHead, TokenEmbedding
from manyformer.models.exit_classifiers import ExitClassifiers
from manyformer.models.language_model import ModelState
from manyformer.models.token_positions import positions_of
from manyformer.sources import SelfSource, WindowSource
from manyformer.sources.self_attention import KVCache
from manyformer.sources.window_cache import RingCache

Next = Callable[[Tensor, State, MemorySequence | None], tuple[Tensor, State]]
"""From tokens (r, 1), a state and, for a decoder, the encoded source to logits (r, 1, v) and the next state."""

Step = Callable[[Tensor, Context, State], tuple[Tensor, State]]
"""A layer for evaluation: the stream and the state after it, without auxiliary losses."""

Map = Callable[[Tensor], Tensor]


def bind(model: ContinuesText | TranslatesText) -> Next:
    """`model` for one token more, as it is now: bind again after its weights have changed."""
    # no protocol, but one of our own classes, which are final: what they compute is known
    own: object = model
    if isinstance(own, LanguageModel) and _still(own):
        return _following(own.embed, own.body, own.head)
    if isinstance(own, EncoderDecoder) and _still(own):
        return _following(own.embed_target, own.decoder, own.head)

    def general(tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        if isinstance(model, TranslatesText):
            assert memory is not None
            out = model.decode(tokens, memory, None, state)
        else:
            out = model(tokens, None, state)
        return out.logits, out.state

    return general


def _following(embed: TokenEmbedding, body: Layer, head: OutputHead) -> Next:
    if isinstance(body, EarlyExit) and isinstance(head, ExitClassifiers) and not (_watched(body) or _watched(head)):
        return leaving(embed, body, head, Tools(_layer, _sure, _simple))
    layers, words = _layer(body), _head(head)

    def following(tokens: Tensor, state: ModelState, memory: MemorySequence | None) -> tuple[Tensor, State]:
        place, tail = positions_of(tokens, None, state.tail)
        assert tail is not None
        x, after = layers(embed(tokens, place), Context(place, memory), state.body)
        return words(x), ModelState(after, tail)

    return following


def _layer(layer: Layer) -> Step:
    bound = None if _watched(layer) else KNOWN.get(type(layer))
    return _unknown(layer) if bound is None else bound(layer)


def _unknown(layer: Layer) -> Step:
    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        y, after, _ = layer(x, ctx, state)
        return y, after

    return step


def _chain(chain: Chain) -> Step:
    steps = [_layer(layer) for layer in chain.children()]  # type: ignore[arg-type]

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        after = []
        for inner, before in zip(steps, state):
            x, kept = inner(x, ctx, before)
            after.append(kept)
        return x, after

    return step


def _residual(residual: Residual) -> Step:
    inner = _layer(residual.inner)
    before, within, after = (_map(part) for part in (residual.pre_norm, residual.inner_norm, residual.post_norm))
    join = residual.join

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        branch, state = inner(x if before is None else before(x), ctx, state)
        branch = branch if within is None else within(branch)
        y = x + branch if join is None else join(x, branch)
        return y if after is None else after(y), state

    return step


def _pointwise(pointwise: Pointwise) -> Step:
    inner = _sure(pointwise.inner)
    return lambda x, ctx, state: (inner(x), state)


def _feedforward(layer: FeedForward) -> Step:
    up, activation, down = _sure(layer.up), _sure(layer.activation), _sure(layer.down)
    return lambda x, ctx, state: (down(activation(up(x))), state)


def _gated(layer: GatedFeedForward) -> Step:
    gate, up, activation, down = _sure(layer.gate), _sure(layer.up), _sure(layer.activation), _sure(layer.down)
    return lambda x, ctx, state: (down(activation(gate(x)) * up(x)), state)


def _attention(layer: Attention) -> Step:
    """Softmax over preallocated keys, a cache of one plain document, all of which is seen, or a ring; or a memory.

    A position may act on the query and on the key before it is kept (rotary ones do), but not on scores or values.
    """
    general = _unknown(layer)
    kernel, source = layer.kernel, layer.source
    if any(_watched(part) for part in (source, *kernel.modules())):
        return general
    if folds(layer):
        assert layer.q_proj is not None
        return fold(layer, _sure(layer.q_proj), _sure(layer.kv_proj), _sure(layer.out_proj), general)
    if not _simple(layer):
        return general
    assert isinstance(kernel, SoftmaxKernel)
    if type(source) is SelfSource and kernel.mask in (Causal(), AllKeys()):
        return _over_cache(layer, kernel, general)
    return _over_ring(layer, kernel, source, general) if isinstance(source, WindowSource) else general


def _over_cache(layer: Attention, kernel: SoftmaxKernel, general: Step) -> Step:
    fresh, attend = _fresh(layer), _attend(layer, kernel)

    def step(x: Tensor, ctx: Context, state: AttentionState) -> tuple[Tensor, State]:
        cache: KVCache = state.source
        begin, layout = cache.length, ctx.positions.layout
        expected = cache.is_contiguous and isinstance(layout, ContiguousLayout) and layout.start == begin
        if not expected or x.shape[1] != 1 or cache.capacity is None or begin >= cache.capacity:
            return general(x, ctx, state)
        q = fresh(x, ctx.positions, cache.k, cache.v, begin)
        y = attend(q, cache.k.narrow(2, 0, begin + 1), cache.v.narrow(2, 0, begin + 1), None)
        after = KVCache(cache.k, cache.v, cache.position_ids, cache.segment_ids, begin + 1, cache.capacity)
        return y, AttentionState(after, state.kernel)

    return step


def _over_ring(layer: Attention, kernel: SoftmaxKernel, source: WindowSource, general: Step) -> Step:
    fresh, attend, seen = _fresh(layer), _attend(layer, kernel), Seen(kernel.mask, layer.heads, source.slots)
    mask, slots = source.mask, source.slots

    def step(x: Tensor, ctx: Context, state: AttentionState) -> tuple[Tensor, State]:
        ring, place = state.source, ctx.positions
        begin = ring.length if isinstance(ring, RingCache) and ring.reserved else None
        expected = isinstance(place.layout, ContiguousLayout) and place.layout.start == begin
        if begin is None or not expected or x.shape[1] != 1 or is_never_evicted(mask, begin):
            return general(x, ctx, state)
        slot = begin % slots
        q = fresh(x, place, ring.k, ring.v, slot)
        ring.position_ids.narrow(1, slot, 1).copy_(place.position_ids)
        ring.segment_ids.narrow(1, slot, 1).copy_(place.segment_ids)
        y = attend(q, ring.k, ring.v, seen(ring, begin))
        return y, AttentionState(ring._replace(length=begin + 1), state.kernel)

    return step


def _fresh(layer: Attention) -> Callable[[Tensor, TokenPositions, Tensor, Tensor, int], Tensor]:
    """Project one token a row, write its key and value into a column, and return its query."""
    assert layer.q_proj is not None
    heads, (groups, key, value) = layer.heads, layer.kv_shape
    to_q, to_kv = _sure(layer.q_proj), _sure(layer.kv_proj)
    turned = layer.position if layer.position.required_seams() - {"embed"} else None

    def write(x: Tensor, positions: TokenPositions, k: Tensor, v: Tensor, column: int) -> Tensor:
        rows = x.shape[0]
        q, kv = to_q(x).view(rows, heads, 1, key), to_kv(x)
        # with one token a row, heads in front of the sequence are only another view
        fresh = kv.narrow(-1, 0, groups * key).view(rows, groups, 1, key)
        if turned is not None:
            q, fresh = turned.query(q, positions), turned.key(fresh, positions)
        k.narrow(2, column, 1).copy_(fresh)
        v.narrow(2, column, 1).copy_(kv.narrow(-1, groups * key, groups * value).view(rows, groups, 1, value))
        return q

    return write


def _attend(layer: Attention, kernel: SoftmaxKernel) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """Attention of one query a row and head, and the output projection."""
    heads, (groups, key, value), out = layer.heads, layer.kv_shape, _sure(layer.out_proj)
    scale = 1 / math.sqrt(key) if kernel.scale is None else kernel.scale

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=heads != groups)
        return out(y.reshape(q.shape[0], 1, heads * value))

    return attend


def _simple(layer: Attention) -> bool:
    """Whether a new token attends by nothing but queries, keys and a mask."""
    kernel = layer.kernel
    return (
        layer.pre_norm is None
        and layer.q_proj is not None
        and type(kernel) is SoftmaxKernel
        and kernel.path in ("auto", "sdpa")
        and layer.position.required_seams() <= {"embed", "query", "key"}
    )


def _head(head: OutputHead) -> Map:
    if not isinstance(head, ClassHead) or head.transform is not None or _watched(head):
        return head
    weight, bias = head.weight, head.bias
    return lambda x: F.linear(x, weight, bias)


def _map(module: nn.Module | None) -> Map | None:
    return None if module is None else _sure(module)


def _sure(module: nn.Module) -> Map:
    """The function of a module that is exactly what its type says; else the module itself."""
    if _watched(module):
        return module
    # a subclass may compute something else
    if type(module) is nn.Linear:
        assert isinstance(module, nn.Linear)
        weight, bias = module.weight, module.bias
        return lambda x: F.linear(x, weight, bias)
    if type(module) is nn.LayerNorm:
        assert isinstance(module, nn.LayerNorm)
        shape, scale, shift, eps = module.normalized_shape, module.weight, module.bias, module.eps
        return lambda x: torch.layer_norm(x, shape, scale, shift, eps)
    if type(module) is nn.GELU:
        assert isinstance(module, nn.GELU)
        form = module.approximate
        return lambda x: F.gelu(x, approximate=form)
    return module


def _still(model: nn.Module) -> bool:
    return not model.training and not _watched(model)


def _watched(module: nn.Module) -> bool:
    """Whether somebody has hooked into the module, so that it must be called as a module."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


KNOWN: dict[type[Layer], Callable[[Any], Step]] = {
    Chain: _chain,
    Residual: _residual,
    Pointwise: _pointwise,
    FeedForward: _feedforward,
    GatedFeedForward: _gated,
    Attention: _attention,
}
