"""The parts of an attention layer, and their steps for one new token per row."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from manyformer.binding import TensorFn, bind_module
from manyformer.core import Context, ContiguousLayout, DecodeStep, State, TokenPositions
from manyformer.kernels.kernel import AttendStep
from manyformer.position import Position
from manyformer.sources.kv_source import KVShape, ProjectKV, ReadMemory, StoredKeys, StoreStep


class AttentionState(NamedTuple):
    """The states of an attention layer's source (cached keys and values), its kernel and its short convolution."""

    source: State
    kernel: State
    convolution: State = None


ProjectToken = Callable[[Tensor, TokenPositions], tuple[Tensor, Tensor, Tensor]]
ProjectQuery = Callable[[Tensor, TokenPositions], Tensor]


class AttentionStep(NamedTuple):
    """The parts of an attention layer, bound to their current parameters, for one new token per row.

    `project` returns queries (b, h, 1, e), keys and values of tokens (b, 1, d), `queries` the first alone. The keys are
    those of the tokens, in the cache `store`, or those of another sequence, which `read_memory` gets from `project_kv`;
    one of the two is None. `output` maps (b, h, 1, f) to the stream.
    """

    project: ProjectToken
    queries: ProjectQuery
    project_kv: ProjectKV
    store: StoreStep | None
    read_memory: ReadMemory | None
    attend: AttendStep
    output: TensorFn

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


def bind_projections(
    q_proj: nn.Linear, kv_proj: nn.Linear, position: Position, heads: int, shape: KVShape
) -> tuple[ProjectToken, ProjectQuery]:
    """Functions from one token per row to queries, keys and values, and to queries alone."""
    kv_heads, head_dim, value_dim = shape
    project_q, project_kv = bind_module(q_proj), bind_module(kv_proj)
    widths = [kv_heads * head_dim, kv_heads * value_dim]
    is_rotated = bool(position.required_seams() & {"query", "key"})

    # with one token per row, the head axis before the sequence axis is only another view
    def queries(x: Tensor, positions: TokenPositions) -> Tensor:
        q = project_q(x).view(x.shape[0], heads, 1, head_dim)
        return position.query(q, positions) if is_rotated else q

    def project(x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Tensor]:
        rows, (k, v) = x.shape[0], project_kv(x).split_with_sizes(widths, -1)
        q, k = project_q(x).view(rows, heads, 1, head_dim), k.view(rows, kv_heads, 1, head_dim)
        v = v.view(rows, kv_heads, 1, value_dim)
        return (position.query(q, positions), position.key(k, positions), v) if is_rotated else (q, k, v)

    return project, queries


def store_step(parts: AttentionStep, store: StoreStep, forward: DecodeStep) -> DecodeStep:
    """Attention to the tokens of the row; `forward` serves calls for which a part is not ready."""
    project, put, attend, output = parts.project, store.store, parts.attend.attend, parts.output
    is_ready = parts.is_ready

    def step(x: Tensor, ctx: Context, state: AttentionState) -> tuple[Tensor, State]:
        positions = ctx.positions
        if not is_ready(positions, state):
            return forward(x, ctx, state)
        q, k, v = project(x, positions)
        k, v, visible, source_state = put(k, v, positions, state.source)
        y, kernel_state = attend(q, k, v, visible, positions, state.kernel)
        return output(y), AttentionState(source_state, kernel_state)

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
        return output(y), AttentionState(stored_state.source, kernel_state)

    return step
