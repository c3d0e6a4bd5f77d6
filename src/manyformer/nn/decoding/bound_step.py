"""One new token per row by functions that are bound once per generation: what modules cost besides their operators.

`Layer.forward` with a state defines decoding, and every layer decodes by it. On a CPU a token of a small model takes as
long to find attributes, hooks and modules as to compute. The layers of this file, which are attention, feed-forward
layers and what joins them, are therefore bound here to their current parameters, and all others called by their
`forward`. At d 256 and 4 layers a token then takes 0.6 to 0.7 of the time of `forward` with softmax attention, also in
a window and to an encoder, 0.4 with a bias by distance, and 0.75 with linear kernels and recurrent memories
(`python benchmarks/decoding_speed.py`).
"""

import operator
from collections.abc import Callable
from typing import Any, final
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyformer.nn.attention.attention import Attention, AttentionState
from manyformer.nn.attention.kv_cache.kv_source import KVCache, ProjectKV, SelfSource
from manyformer.nn.attention.output_stages import GatedNormStage, OutputStage
from manyformer.nn.convolution.token_neighbours import ConvolvedInput
from manyformer.nn.core import Chain, Context, ContiguousLayout, Layer, Pointwise, RingLayout, State, TokenPositions
from manyformer.nn.decoding.acting_step import acting_step, transposed_copy
from manyformer.nn.feed_forward.feedforward import ChunkedLayer, FeedForward, GatedFeedForward
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.linear.linear_kernel import LinearKernel, LinearState
from manyformer.nn.linear.memory_rules import TokenFeatures
from manyformer.nn.linear.recurrent_rules import GateProjections
from manyformer.nn.masks import AllKeys, Causal
from manyformer.nn.masks.eviction import visible_in_ring
from manyformer.nn.positions.position import Position
from manyformer.nn.residual import AddJoin, BoundJoin, Residual, ResidualJoin
from manyformer.nn.runtime.head_selection import HeadProjection
from manyformer.nn.runtime.length_norms import RMSNorm
from manyformer.nn.runtime.torch_internals import has_hooks, is_plain
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel
from manyformer.nn.streams import BranchPlace, StreamLayer, StreamRule, StreamStack

TensorFn = Callable[[Tensor], Tensor]

DecodeStep = Callable[[Tensor, Context, State], tuple[Tensor, State]]
"""A layer for one new token per row, in evaluation mode and without gradients: the stream and the next state."""


def bind_step(layer: Layer) -> DecodeStep:
    """The layer bound to its current parameters; its `forward` where this file does not know it, or where hooks are."""
    binder = _binder_of(layer)
    if binder is None:
        return forward_step(layer)
    return binder(layer)


def is_bound(layer: Layer) -> bool:
    """Whether `bind_step` binds the layer itself, whatever it is made of."""
    return _binder_of(layer) is not None


def _binder_of(layer: Layer) -> Callable[[Any], DecodeStep] | None:
    """The function that binds layers of this kind; None for a layer that decodes by `forward`."""
    if not is_plain(layer, type(layer)):
        return None
    # a subclass may compute something else
    if type(layer) is Attention and (layer.q_proj is None or layer.kernel.extra_query_dim):
        return None
    return LAYER_BINDERS.get(type(layer))


def forward_step(layer: Layer) -> DecodeStep:
    """`forward` without the auxiliary loss."""
    forward = callable_of(layer)

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        y, next_state, _ = forward(x, ctx, state)
        return y, next_state

    return step


def callable_of(module: nn.Module) -> Callable[..., Any]:
    """The `forward` of the module with its current parameters; the module itself where hooks are to be called."""
    twin = twin_of(module, {})
    if twin is module:
        return module
    return twin.forward


def twin_of(module: nn.Module, twins: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the module with its parameters, whose parts are ordinary attributes and are called without hooks.

    That halves what modules cost besides their operators, for layers that this file does not know, too. A part that
    has hooks, or a `forward` or a call of its own, or knows one of its parts by identity, stays itself. `twins` are
    those made so far, since modules may share parts."""
    is_called_otherwise = "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__
    if has_hooks(module) or is_called_otherwise or _refers_to_modules(module):
        return module
    if module not in twins:
        kind = _twin_type(type(module))
        twin = twins[module] = kind.__new__(kind)
        attributes = vars(twin)
        attributes.update(vars(module))
        parts = {name: part and twin_of(part, twins) for name, part in module._modules.items()}
        # a dictionary of its own: that of the module must not hear of twins
        attributes["_modules"] = parts
        attributes.update({**module._parameters, **module._buffers, **parts})
    return twins[module]


@final
class ModuleParts:
    """The modules inside of a module and their hooks, which may become others after it was bound.

    Asked at every token: torch numbers all hooks, so that those of no module are looked at as long as there is no new
    one, and parts are compared as wholes, since a loop over modules takes as long as a layer."""

    def __init__(self, module: nn.Module) -> None:
        # once for each generation: `modules()` would take longer than a layer
        modules = [module]
        for part in modules:
            modules += [child for child in part._modules.values() if child is not None]
        # modules with hooks are called as modules already
        hooks = [hooks for part in modules for hooks in (part._forward_hooks, part._forward_pre_hooks)]
        self._without_hooks = [container for container in hooks if not container]
        self._next_hook = RemovableHandle.next_id
        self._leaves = [part._modules for part in modules if not part._modules]
        self._parts = [part._modules for part in modules if part._modules]
        self._bound_parts = [dict(parts) for parts in self._parts]

    def have_changed(self) -> bool:
        """Whether a module has its first hook or a part that it had not."""
        if any(self._leaves) or self._parts != self._bound_parts:
            return True
        if RemovableHandle.next_id != self._next_hook:
            self._next_hook = RemovableHandle.next_id
            return any(self._without_hooks)
        return False


def _refers_to_modules(module: nn.Module) -> bool:
    """Whether it keeps modules in a list or tuple, which are no parts of it but may be parts of its parts."""
    values = (value for value in vars(module).values() if isinstance(value, list | tuple))
    return any(isinstance(item, nn.Module) for value in values for item in value)


_TWIN_TYPES: WeakValueDictionary[type[nn.Module], type[nn.Module]] = WeakValueDictionary()
"""The classes of the twins that exist. Parametrizations make a class for each module, which must not stay for ever."""


def _twin_type(kind: type[nn.Module]) -> type[nn.Module]:
    """The class with `forward` in place of the call, which would look for hooks."""
    twin_type = _TWIN_TYPES.get(kind)
    if twin_type is None:
        twin_type = type(kind.__name__, (kind,), {"__call__": kind.forward})
        _TWIN_TYPES[kind] = twin_type
    return twin_type


def bind_module(module: nn.Module) -> TensorFn:
    """The function of a module of one tensor, with its current parameters; the module itself where it has hooks."""
    binder = MODULE_BINDERS.get(type(module))
    if binder is None or not is_plain(module, type(module)):
        return callable_of(module)
    return binder(module)


def bind_optional(module: nn.Module | None) -> TensorFn | None:
    """`bind_module`, and None for None."""
    if module is None:
        return None
    return bind_module(module)


def _bind_linear(module: nn.Linear) -> TensorFn:
    weight = module.weight
    bias = module.bias
    return lambda x: F.linear(x, weight, bias)


def _bind_layer_norm(module: nn.LayerNorm) -> TensorFn:
    shape = module.normalized_shape
    weight = module.weight
    bias = module.bias
    eps = module.eps
    return lambda x: torch.layer_norm(x, shape, weight, bias, eps)


def _bind_rms_norm(module: nn.RMSNorm) -> TensorFn:
    shape = module.normalized_shape
    weight = module.weight
    eps = module.eps
    return lambda x: torch.rms_norm(x, shape, weight, eps)


def _bind_chain(chain: Chain) -> DecodeStep:
    steps = [bind_step(layer) for layer in chain.in_order()]

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        next_states = []
        for layer_step, layer_state in zip(steps, state):
            x, next_state = layer_step(x, ctx, layer_state)
            next_states.append(next_state)
        return x, next_states

    return step


def _bind_pointwise(layer: Pointwise) -> DecodeStep:
    inner = bind_module(layer.inner)
    return lambda x, ctx, state: (inner(x), state)


def _bind_residual(branch: Residual) -> DecodeStep:
    inner = bind_step(branch.inner)
    add = bind_join(branch.join)
    pre_norm, inner_norm, post_norm = map(bind_optional, (branch.pre_norm, branch.inner_norm, branch.post_norm))

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        y, next_state = inner(x if pre_norm is None else pre_norm(x), ctx, state)
        y = add(x, y if inner_norm is None else inner_norm(y))
        return y if post_norm is None else post_norm(y), next_state

    return step


def _bind_summand(branch: Residual) -> DecodeStep:
    """What a branch that only adds adds to the stream."""
    inner = bind_step(branch.inner)
    pre_norm = bind_optional(branch.pre_norm)
    inner_norm = bind_optional(branch.inner_norm)
    scale = branch.join.scale if isinstance(branch.join, AddJoin) else 1.0

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        y, next_state = inner(x if pre_norm is None else pre_norm(x), ctx, state)
        y = y if inner_norm is None else inner_norm(y)
        return y if scale == 1.0 else y * scale, next_state

    return step


def _bind_stream_layer(layer: StreamLayer) -> DecodeStep:
    """The layer alone, whose branches are added in turn."""
    steps = [_bind_summand(branch) for branch in layer.branches()]

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        next_states = []
        for branch_step, branch_state in zip(steps, state):
            y, next_state = branch_step(x, ctx, branch_state)
            x = x + y
            next_states.append(next_state)
        return x, next_states

    return step


def _bind_stream_stack(stack: StreamStack) -> DecodeStep:
    """The rule of the stack around bound branches."""
    if not all(is_plain(layer, StreamLayer) for layer in stack.numbered_layers):
        return forward_step(stack)
    first_steps = [bind_step(layer) for layer in stack.first_layers]
    last_steps = [bind_step(layer) for layer in stack.last_layers]
    rule: StreamRule[Any] = twin_of(stack.rule, {})  # type: ignore[assignment]
    layers: list[list[tuple[BranchPlace, DecodeStep]]] = []
    for number, layer in enumerate(stack.numbered_layers):
        branches = list(layer.branches())
        places = [BranchPlace(number, index, len(branches)) for index in range(len(branches))]
        layers.append([(place, _bind_summand(branch)) for place, branch in zip(places, branches)])
    context = stack.context

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        ctx = context(ctx)
        states = iter(state)
        next_states: list[State] = []
        for first_step in first_steps:
            x, next_state = first_step(x, ctx, next(states))
            next_states.append(next_state)
        streams = rule.start(x)
        for branches in layers:
            layer_states = []
            for (place, branch_step), branch_state in zip(branches, next(states)):
                branch_input, streams = rule.read(streams, place)
                y, next_state = branch_step(branch_input, ctx, branch_state)
                streams = rule.write(streams, place, y)
                layer_states.append(next_state)
            next_states.append(layer_states)
        x = rule.finish(streams)
        for last_step in last_steps:
            x, _ = last_step(x, ctx, None)
        return x, next_states

    return step


def _bind_convolved_input(layer: ConvolvedInput) -> DecodeStep:
    convolve = callable_of(layer.short_convolution)
    inner = bind_step(layer.inner)

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        convolved, inner_state = state
        (x,), convolved = convolve([x], ctx.positions, convolved)
        y, inner_state = inner(x, ctx, inner_state)
        return y, [convolved, inner_state]

    return step


def bind_join(join: ResidualJoin | None) -> BoundJoin:
    """The join in evaluation mode."""
    if join is None:
        return operator.add
    if has_hooks(join):
        return join
    return join.bind(transposed_copy)


def _bind_feed_forward(layer: FeedForward) -> DecodeStep:
    up, activation, down = map(bind_module, (layer.up, layer.activation, layer.down))
    return lambda x, ctx, state: (down(activation(up(x))), state)


def _bind_gated_feed_forward(layer: GatedFeedForward) -> DecodeStep:
    gate, up, activation, down = map(bind_module, (layer.gate, layer.up, layer.activation, layer.down))
    return lambda x, ctx, state: (down(activation(gate(x)) * up(x)), state)


def _bind_attention(layer: Attention) -> DecodeStep:
    """Projections without their modules; the source and the kernel decode by their own `forward`."""
    if layer.source.keeps_inputs:
        step_in_rollout = acting_step(layer)
        if step_in_rollout is not None:
            return step_in_rollout
    project = _bind_projections(layer)
    attend = _bind_kernel(layer)
    read = _bind_source(layer)
    out_proj = bind_module(layer.out_proj)
    head_gates = layer.head_gates
    pre_norm = bind_optional(layer.pre_norm)
    stage = _bind_stage(layer.output_stage)

    # what differs from token to token comes as an argument, all else was looked up once
    def step(x: Tensor, ctx: Context, state: AttentionState) -> tuple[Tensor, State]:
        positions = ctx.positions
        normed = x if pre_norm is None else pre_norm(x)
        q, project_kv, convolved = project(normed, positions, state.convolution)
        # the source gets the stream itself, because some sources remember it
        k, v, key_positions, source_state = read(x, ctx, project_kv, state.source)
        y, kernel_state = attend(q, k, v, key_positions, state.kernel, ctx)
        y = y if stage is None else stage(y, normed)
        # with one token per row, heads before and after the sequence axis are stored alike
        y = out_proj((y if head_gates is None else head_gates(y)).reshape(y.shape[0], 1, -1))
        return y, AttentionState(source_state, kernel_state, convolved)

    return step


BoundProjections = Callable[[Tensor, TokenPositions, State], tuple[Tensor, ProjectKV, State]]
"""From normed tokens (b, 1, d), their positions and the state of the convolution to queries (b, h, 1, e), the function
that projects keys and values, and the next state of the convolution."""


def _bind_projections(layer: Attention) -> BoundProjections:
    assert layer.q_proj is not None
    heads = layer.heads
    key_heads = layer.key_heads
    kv_heads, head_dim, _ = layer.kv_shape
    position = layer.position
    gates = bind_optional(layer.kernel.gate_projection)
    project_q, project_kv, pre_norm = map(bind_optional, (layer.q_proj, layer.kv_proj, layer.pre_norm))
    value_dim = layer.kv_shape.value_dim
    if gates is not None:
        value_dim -= layer.kernel.gate_dim
    # keys first, then values, and with them the gates that the layer projects
    widths = [key_heads * head_dim, kv_heads * value_dim]
    is_rotated = bool(position.overridden & {"query", "key"})
    value_stages = [callable_of(stage) for stage in layer.value_stages or ()]
    assert project_q is not None
    assert project_kv is not None

    # with one token per row, the head axis before the sequence axis is only another view
    def split_queries(q: Tensor, positions: TokenPositions) -> Tensor:
        q = q.view(q.shape[0], -1, 1, head_dim)
        q = position.query(q, positions) if is_rotated else q
        query_heads = q.shape[1]
        if query_heads == heads:
            return q
        return q.repeat_interleave(heads // query_heads, 1)

    def split_keys_values(keys_values: Tensor, x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        rows = keys_values.shape[0]
        k, v = keys_values.split_with_sizes(widths, -1)
        k = k.view(rows, key_heads, 1, head_dim)
        v = v.view(rows, kv_heads, 1, -1)
        k = position.key(k, positions) if is_rotated else k
        if key_heads != kv_heads:
            k = k.repeat_interleave(kv_heads // key_heads, 1)
        for stage in value_stages:
            v = stage(v, x, positions)
        return k, v if gates is None else torch.cat([v, gates(x).to(v.dtype)], -1)

    def project_keys_values(x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        if x.shape[1] != 1:
            # what a source projects beside the new token: another sequence, or remembered inputs
            return layer.project_kv(x, positions)
        normed = x if pre_norm is None else pre_norm(x)
        return split_keys_values(project_kv(normed), normed, positions)

    def project(x: Tensor, positions: TokenPositions, state: State) -> tuple[Tensor, ProjectKV, State]:
        return split_queries(project_q(x), positions), project_keys_values, state

    if layer.short_convolution is None:
        return project
    convolve = callable_of(layer.short_convolution)

    def project_convolved(x: Tensor, positions: TokenPositions, state: State) -> tuple[Tensor, ProjectKV, State]:
        # what is convolved here are normed tokens, whose norm `step` has taken
        (q, keys_values), next_state = convolve([project_q(x), project_kv(x)], positions, state)
        projected = split_keys_values(keys_values, x, positions)
        return split_queries(q, positions), lambda *_: projected, next_state

    return project_convolved


def _bind_stage(stage: OutputStage | None) -> Callable[[Tensor, Tensor], Tensor] | None:
    if stage is None:
        return None
    if type(stage) is not GatedNormStage or has_hooks(stage):
        return callable_of(stage)
    combine = stage.combine
    gate = bind_optional(stage.gate)
    return lambda y, x: combine(y, None if gate is None else gate(x))


ReadKeys = Callable[[Tensor, Context, ProjectKV, State], tuple[Tensor, Tensor, TokenPositions | None, State]]
"""From tokens, the call's values, the projections and the state to keys, values, their positions and the next state.

None in place of positions says that rows are one document each without padding, of which the token is the last."""


def _bind_source(layer: Attention) -> ReadKeys:
    """The source's `forward`; a cache of all tokens need not give their positions where softmax attention sees all."""
    source = callable_of(layer.source)

    def read(
        x: Tensor, ctx: Context, project: ProjectKV, state: State
    ) -> tuple[Tensor, Tensor, TokenPositions | None, State]:
        k, v, positions, next_state, _ = source(x, ctx, project, state)
        return k, v, positions, next_state

    if type(layer.source) is not SelfSource or has_hooks(layer.source) or not _sees_all_so_far(layer):
        return read

    def append(
        x: Tensor, ctx: Context, project: ProjectKV, cache: KVCache
    ) -> tuple[Tensor, Tensor, TokenPositions | None, State]:
        # the cache itself, instead of the source that would append to it
        next_cache = cache.append(*project(x, ctx.positions), ctx.positions)
        return *next_cache.keys_values(), None if next_cache.is_contiguous else next_cache.positions(), next_cache

    return append


def _sees_all_so_far(layer: Attention) -> bool:
    """Whether the layer is softmax attention of the last token to all before it, with at most a bias by distance."""
    kernel = layer.kernel
    scores = layer.position.overridden & {"score", "value"}
    if type(kernel) is not SoftmaxKernel or not isinstance(kernel.mask, AllKeys | Causal) or has_hooks(kernel):
        return False
    if not scores:
        return kernel.path in ("auto", "sdpa")
    return kernel.path == "auto" and _adds_bias(layer.position)


def _adds_bias(position: Position) -> bool:
    """Whether the position is a bias by distance in the scores, and nothing else there."""
    terms = position.distance_terms(1, 0)
    # terms of keys or values are vectors, which no bias of scores can stand for
    return terms is not None and terms.bias is not None and terms.keys is terms.values is terms.query_bias is None


Attend = Callable[[Tensor, Tensor, Tensor, TokenPositions | None, State, Context], tuple[Tensor, State]]
"""From queries, keys, values, the positions of keys, the kernel's state and the call's values to outputs and state."""


def _bind_kernel(layer: Attention) -> Attend:
    """The kernel's `forward`; softmax attention of the last token to all before it skips the search for its path."""
    kernel = layer.kernel
    position = layer.position
    compute = callable_of(layer.kernel)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, key_positions: TokenPositions | None, state: State, ctx: Context
    ) -> tuple[Tensor, State]:
        assert key_positions is not None
        y, next_state, _ = compute(KernelCall(q, k, v, ctx.positions, key_positions, position, state, ctx.watch))
        return y, next_state

    if type(kernel) is LinearKernel and not has_hooks(kernel):
        return _bind_linear_kernel(kernel, attend)
    if type(kernel) is SoftmaxKernel and not has_hooks(kernel) and layer.source.keeps_ring:
        return _bind_window(kernel, layer, attend)
    if not _sees_all_so_far(layer):
        return attend
    assert isinstance(kernel, SoftmaxKernel)
    bias = None
    if position.overridden & {"score", "value"}:
        # the same biases for every token, only shifted by one
        bias = _BiasTable(position)
    scale = kernel.score_scale(layer.kv_shape.head_dim)
    is_grouped = layer.heads != layer.kv_shape.kv_heads
    sees_all = bias is None and isinstance(kernel.mask, AllKeys)
    attention = F.scaled_dot_product_attention

    def attend_as_last(
        q: Tensor, k: Tensor, v: Tensor, key_positions: TokenPositions | None, state: State, ctx: Context
    ) -> tuple[Tensor, State]:
        # of another sequence it sees every key as well
        if key_positions is None or (sees_all and isinstance(key_positions.layout, ContiguousLayout)):
            mask = None
            if bias is not None:
                mask = bias.of_keys(k.shape[2], q)
            return attention(q, k, v, mask, scale=scale, enable_gqa=is_grouped), state
        return attend(q, k, v, key_positions, state, ctx)

    return attend_as_last


def _bind_window(kernel: SoftmaxKernel, layer: Attention, attend: Attend) -> Attend:
    """Softmax attention to a ring: what its mask shows is known for many tokens ahead."""
    if layer.position.overridden & {"score", "value"} or kernel.path not in ("auto", "sdpa"):
        return attend
    scale = kernel.score_scale(layer.kv_shape.head_dim)
    is_grouped = layer.heads != layer.kv_shape.kv_heads
    mask = kernel.mask
    heads = layer.heads
    attention = F.scaled_dot_product_attention

    def attend_to_ring(
        q: Tensor, k: Tensor, v: Tensor, key_positions: TokenPositions | None, state: State, ctx: Context
    ) -> tuple[Tensor, State]:
        if key_positions is None or not isinstance(key_positions.layout, RingLayout):
            return attend(q, k, v, key_positions, state, ctx)
        # what the mask shows of a ring repeats with its slots, and is kept
        visible = visible_in_ring(mask, heads, key_positions)
        return attention(q, k, v, visible, scale=scale, enable_gqa=is_grouped), state

    return attend_to_ring


def _bind_linear_kernel(kernel: LinearKernel, attend: Attend) -> Attend:
    """Linear attention of one more token, for which its features and its rule are called as functions."""
    if kernel.mask != Causal() or kernel.path not in ("auto", "recurrent"):
        return attend
    features = callable_of(kernel.features)
    rule = callable_of(kernel.rule)
    if kernel.key_features is None:
        map_keys = features
    else:
        map_keys = callable_of(kernel.key_features)
    chunk = kernel.chunk
    floor = kernel.floor
    gate_dim = kernel.gate_dim

    def attend_to_memory(
        q: Tensor, k: Tensor, v: Tensor, key_positions: TokenPositions | None, state: LinearState, ctx: Context
    ) -> tuple[Tensor, State]:
        positions = ctx.positions
        dtype = v.dtype
        is_plain = isinstance(positions.layout, ContiguousLayout) and not state.is_empty and q.shape[1] == v.shape[1]
        # autocast must not lower the precision of the memory
        if not is_plain or torch.is_autocast_enabled(q.device.type):
            return attend(q, k, v, key_positions, state, ctx)
        compute_dtype = torch.promote_types(dtype, torch.float32)
        if not q.dtype == k.dtype == dtype == compute_dtype:
            q, k, v = (x.to(compute_dtype) for x in (q, k, v))
        # gates are the last channels of the values
        gate = None
        key_features, log_scale = map_keys(k, positions)
        if gate_dim:
            v, gate = v.split_with_sizes([v.shape[-1] - gate_dim, gate_dim], -1)
        query_features = features(q, positions).y
        tokens = TokenFeatures(query_features, key_features, v, log_scale, gate, None, None, dtype)
        y, memory, _ = rule(tokens, state.memory, form="recurrent", chunk=chunk, floor=floor)
        return y.to(dtype), LinearState(memory, positions.segment_ids[:, -1])

    return attend_to_memory


class _BiasTable:
    """Biases of scores by the distances so far, computed again for twice as many where there are more."""

    def __init__(self, position: Position) -> None:
        self.position = position
        self.bias: Float[Tensor, "1 #h 1 r"] | None = None

    def of_keys(self, count: int, like: Tensor) -> Float[Tensor, "1 #h 1 s"]:
        """The biases of `count` keys, the last of which is the query's own."""
        if self.bias is None or self.bias.shape[-1] < count:
            self.bias = self._compute(2 * count).to(like.dtype)
        return self.bias[..., -count:]

    def _compute(self, count: int) -> Float[Tensor, "1 #h 1 r"]:
        terms = self.position.distance_terms(count - 1, 0)
        assert terms is not None
        assert terms.bias is not None
        # the first column serves all larger distances
        farther = terms.bias[:, :1].expand(-1, count - 1 - terms.lookback)
        return torch.cat([farther, terms.bias], -1)[None, :, None]


def _bind_head_projection(module: HeadProjection) -> TensorFn:
    down = bind_optional(module.down)
    up = bind_module(module.up)
    heads = module.heads
    width = module.width
    return lambda x: up(x if down is None else down(x)).view(*x.shape[:2], heads, width).transpose(1, 2)


def _bind_gate_projections(module: GateProjections) -> TensorFn:
    projections = [bind_module(projection) for projection in module.children()]
    return lambda x: torch.cat([projection(x) for projection in projections], -1)


MODULE_BINDERS: dict[type[nn.Module], Callable[[Any], TensorFn]] = {
    nn.Linear: _bind_linear,
    nn.LayerNorm: _bind_layer_norm,
    nn.RMSNorm: _bind_rms_norm,
    RMSNorm: _bind_rms_norm,
    HeadProjection: _bind_head_projection,
    GateProjections: _bind_gate_projections,
}
"""How modules become functions, by their exact type."""

LAYER_BINDERS: dict[type[Layer], Callable[[Any], DecodeStep]] = {
    Chain: _bind_chain,
    Pointwise: _bind_pointwise,
    Residual: _bind_residual,
    StreamStack: _bind_stream_stack,
    StreamLayer: _bind_stream_layer,
    ConvolvedInput: _bind_convolved_input,
    FeedForward: _bind_feed_forward,
    GatedFeedForward: _bind_gated_feed_forward,
    ChunkedLayer: lambda layer: bind_step(layer.inner),
    Attention: _bind_attention,
}
"""The layers that are bound, by their exact type."""
