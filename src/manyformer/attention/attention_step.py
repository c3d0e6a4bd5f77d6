"""The parts of an attention layer, and their steps for one new token per row."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from manyformer.attention.output_stages import OutputStage
from manyformer.attention.short_convolution import ShortConvolution
from manyformer.binding import bind_module, bind_optional
from manyformer.core import Context, ContiguousLayout, DecodeStep, State, TokenPositions
from manyformer.kernels.kernel import AttendStep
from manyformer.position import Position
from manyformer.sources.kv_source import KVShape, ProjectKV, ReadMemory, StoredKeys, StoreStep


class AttentionState(NamedTuple):
    """The states of an attention layer's source (cached keys and values), its kernel and its short convolution."""

    source: State
    kernel: State
    convolution: State = None


ProjectToken = Callable[[Tensor, TokenPositions, State], tuple[Tensor, Tensor, Tensor, State]]
ProjectQuery = Callable[[Tensor, TokenPositions], Tensor]
ProjectOutput = Callable[[Tensor, Tensor], Tensor]


class AttentionStep(NamedTuple):
    """The parts of an attention layer, bound to their current parameters, for one new token per row.

    `project` returns queries (b, h, 1, e), keys and values of tokens (b, 1, d), with the next state of the layer's
    convolution, `queries` the first alone. The keys are those of the tokens, in the cache `store`, or those of another
    sequence, which `read_memory` gets from `project_kv`; one of the two is None. `output` maps (b, h, 1, f) to the
    stream; its second argument is the layer's input. `is_convolved` says that projections depend on earlier tokens.
    """

    project: ProjectToken
    queries: ProjectQuery
    project_kv: ProjectKV
    store: StoreStep | None
    read_memory: ReadMemory | None
    attend: AttendStep
    output: ProjectOutput
    is_convolved: bool

    def is_ready(self, positions: TokenPositions, state: AttentionState) -> bool:
        """Whether the parts serve these tokens and this state; `forward` serves all."""
        store_is_ready = None if self.store is None else self.store.is_ready
        return (
            isinstance(positions.layout, ContiguousLayout)
            and (store_is_ready is None or store_is_ready(positions, state.source))
            and (self.attend.is_ready is None or self.attend.is_ready(positions, state.kernel))
        )

    def store_keys(self, k: Tensor, v: Tensor, positions: TokenPositions, state: AttentionState) -> StoredKeys:
        """Store the keys and values of tokens; the result has the state of the layer."""
        assert self.store is not None
        stored = self.store.store(k, v, positions, state.source)
        return stored._replace(state=AttentionState(stored.state, state.kernel))

    def memory_keys(self, ctx: Context, state: AttentionState) -> StoredKeys:
        """The keys and values of the sequence in `ctx`; the result has the state of the layer."""
        if ctx.memory is None or self.read_memory is None:
            raise ValueError("cross-attention needs a sequence to attend to, but ctx.memory is None")
        stored = self.read_memory(ctx.memory, self.project_kv, state.source)
        return stored._replace(state=AttentionState(stored.state, state.kernel))


class TokenProjections(NamedTuple):
    """What makes queries, keys and values of tokens; `gates`, if there are any, are the last channels of the values.

    Heads of queries and of keys may be fewer than `heads` and those of `shape`; adjacent ones then share them."""

    q_proj: nn.Linear
    kv_proj: nn.Linear
    position: Position
    gates: nn.Module | None
    convolution: ShortConvolution | None
    heads: int
    key_heads: int
    shape: KVShape

    def bind(self) -> tuple[ProjectToken, ProjectQuery]:
        """Functions from one token per row to queries, keys and values, and, without a convolution, to queries."""
        position, heads, key_heads, (kv_heads, head_dim, _) = self.position, self.heads, self.key_heads, self.shape
        project_q, project_kv, gates = bind_module(self.q_proj), bind_module(self.kv_proj), bind_optional(self.gates)
        query_dim, kv_dim, key_dim = self.q_proj.out_features, self.kv_proj.out_features, key_heads * head_dim
        query_heads, widths = query_dim // head_dim, [key_dim, kv_dim - key_dim]
        is_rotated = bool(position.required_seams() & {"query", "key"})

        # with one token per row, the head axis before the sequence axis is only another view
        def split_queries(q: Tensor, positions: TokenPositions) -> Tensor:
            q = q.view(q.shape[0], query_heads, 1, head_dim)
            q = position.query(q, positions) if is_rotated else q
            return q if query_heads == heads else q.repeat_interleave(heads // query_heads, 1)

        def split_keys_values(keys_values: Tensor, x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
            rows = keys_values.shape[0]
            k, v = keys_values.split_with_sizes(widths, -1)
            k, v = k.view(rows, key_heads, 1, head_dim), v.view(rows, kv_heads, 1, -1)
            k = position.key(k, positions) if is_rotated else k
            k = k if key_heads == kv_heads else k.repeat_interleave(kv_heads // key_heads, 1)
            return k, v if gates is None else torch.cat([v, gates(x).to(v.dtype)], -1)

        def project(x: Tensor, positions: TokenPositions, state: State) -> tuple[Tensor, Tensor, Tensor, State]:
            q, (k, v) = split_queries(project_q(x), positions), split_keys_values(project_kv(x), x, positions)
            return q, k, v, state

        def queries(x: Tensor, positions: TokenPositions) -> Tensor:
            return split_queries(project_q(x), positions)

        if self.convolution is None:
            return project, queries
        convolve = self.convolution.decode_step()

        def project_convolved(
            x: Tensor, positions: TokenPositions, state: State
        ) -> tuple[Tensor, Tensor, Tensor, State]:
            mixed, state = convolve(torch.cat([project_q(x), project_kv(x)], -1), positions, state)
            q, keys_values = mixed.split_with_sizes([query_dim, kv_dim], -1)
            return split_queries(q, positions), *split_keys_values(keys_values, x, positions), state

        return project_convolved, queries


def bind_output(out_proj: nn.Linear, head_gates: nn.Module | None, stage: OutputStage | None) -> ProjectOutput:
    """A function from the outputs of heads (b, h, 1, f) and the layer's input (b, 1, d) to the stream."""
    project, stage_step = bind_module(out_proj), None if stage is None else stage.bind()

    def output(y: Tensor, x: Tensor) -> Tensor:
        y = y if stage_step is None else stage_step(y, x)
        # with one token per row, heads before and after the sequence axis are stored alike
        return project((y if head_gates is None else head_gates(y)).reshape(y.shape[0], 1, -1))

    return output


def store_step(parts: AttentionStep, store: StoreStep, forward: DecodeStep) -> DecodeStep:
    """Attention to the tokens of the row; `forward` serves calls for which a part is not ready."""
    project, put, attend, output = parts.project, store.store, parts.attend.attend, parts.output
    is_ready = parts.is_ready

    def step(x: Tensor, ctx: Context, state: AttentionState) -> tuple[Tensor, State]:
        positions = ctx.positions
        if not is_ready(positions, state):
            return forward(x, ctx, state)
        q, k, v, convolved = project(x, positions, state.convolution)
        k, v, visible, source_state = put(k, v, positions, state.source)
        y, kernel_state = attend(q, k, v, visible, positions, state.kernel)
        return output(y, x), AttentionState(source_state, kernel_state, convolved)

    return step


def memory_step(parts: AttentionStep, forward: DecodeStep) -> DecodeStep:
    """Attention to another sequence."""
    queries, memory_keys, attend, output = parts.queries, parts.memory_keys, parts.attend.attend, parts.output
    is_ready = parts.is_ready

    def step(x: Tensor, ctx: Context, state: AttentionState) -> tuple[Tensor, State]:
        positions = ctx.positions
        if not is_ready(positions, state):
            return forward(x, ctx, state)
        k, v, visible, stored_state = memory_keys(ctx, state)
        y, kernel_state = attend(queries(x, positions), k, v, visible, positions, state.kernel)
        return output(y, x), AttentionState(stored_state.source, kernel_state)

    return step
