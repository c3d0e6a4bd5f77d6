"""Attention of one new token per row to a segment memory, whose scores have a vector for each distance."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.binding import TensorFn, bind_optional, bind_rows, has_hooks
from manyformer.core import AlignedLayout, Context, ContiguousLayout, DecodeStep, State, TokenPositions
from manyformer.position import Position
from manyformer.sources.acting_memory import ActingMemory, RememberedStep, begin_acting, end_acting
from manyformer.sources.kv_source import KVShape, ProjectKV
from manyformer.sources.segment_memory import RememberedInputs


class MemoryProjections(NamedTuple):
    """The norm of the layer's inputs (None: none), and the projections of the attention."""

    pre_norm: nn.Module | None
    queries: nn.Linear
    keys_values: nn.Linear
    outputs: nn.Linear


class MemoryAttentionParts(NamedTuple):
    """The parts of an attention layer with as many key heads as query heads.

    A query sees the `size` tokens before it; `scale` multiplies scores."""

    projections: MemoryProjections
    project_kv: ProjectKV
    position: Position
    shape: KVShape
    size: int
    scale: float

    @property
    def is_hooked(self) -> bool:
        """Whether one of the modules must be called as a module."""
        modules = (*self.projections, self.position)
        return any(has_hooks(module) for module in modules if module is not None)


def memory_attention_step(parts: MemoryAttentionParts, forward: DecodeStep) -> DecodeStep | None:
    """Attention bound to its current parameters, for consecutive tokens; `forward` serves all other calls.

    None unless the position has a vector for each distance, and nothing else. The state that it returns is known to
    the step alone, until `end_acting` makes one of it that `forward` continues from as well."""
    attend, out_proj = _bind_attention(parts), parts.projections.outputs
    if attend is None:
        return None
    output = bind_rows(out_proj.weight, out_proj.bias)

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        is_consecutive = isinstance(ctx.positions.layout, ContiguousLayout | AlignedLayout)
        if not (is_consecutive and isinstance(state.source, RememberedInputs | ActingMemory)):
            return forward(x, ctx, end_acting(state))
        y, memory = attend(x, ctx.positions, state.source)
        return output(y)[:, None], state._replace(source=memory)

    return step


AttendMemory = Callable[[Tensor, TokenPositions, RememberedInputs | ActingMemory], tuple[Tensor, ActingMemory]]
"""From tokens (b, 1, d), their positions and the memory to the outputs of all heads (b, h f) and the next memory."""


def _bind_attention(parts: MemoryAttentionParts) -> AttendMemory | None:
    projections, project_kv, position, (heads, width, value_width), size, scale = parts
    terms, content_bias = position.distance_terms(size, 0), position.query_vector
    if parts.is_hooked or terms is None or content_bias is None or value_width != width:
        return None
    if terms.keys is None or terms.query_bias is None or not (terms.bias is terms.values is None):
        return None
    distance_keys = terms.keys.mT.contiguous()
    distances = torch.arange(size, -1, -1, device=distance_keys.device)
    visible_score, hidden_score = distance_keys.new_tensor(0.0), distance_keys.new_tensor(-torch.inf)
    project = _bind_projection(projections, content_bias, content_bias + terms.query_bias)
    norm = bind_optional(projections.pre_norm)

    def attend(
        x: Tensor, positions: TokenPositions, state: RememberedInputs | ActingMemory
    ) -> tuple[Tensor, ActingMemory]:
        if not isinstance(state, ActingMemory):
            state = begin_acting(state._replace(x=state.x.to(x.dtype)), positions, project_kv, size)
        rows = x.shape[0]
        projected = project((x if norm is None else norm(x)).flatten(0, 1)).view(rows, 4, heads, width)
        # heads first: the vectors of distances are one matrix for all rows of a head
        content_queries, distance_queries, *_ = by_head = projected.permute(1, 2, 0, 3)
        memory = state.append(RememberedStep(x, positions), by_head[2:])
        start, length = memory.start, memory.stop - memory.start
        keys, values = memory.keys.narrow(1, start, length), memory.values.narrow(1, start, length)
        # the keys of earlier documents are farther away than the first token of this one
        is_hidden = distances[size + 1 - length :] > positions.position_ids
        mask = torch.where(is_hidden, hidden_score, visible_score).expand(heads, rows, length)
        distance_scores = torch.baddbmm(mask, distance_queries, distance_keys.narrow(2, size + 1 - length, length))
        queries = content_queries.reshape(heads * rows, 1, width)
        scores = torch.baddbmm(distance_scores.view(heads * rows, 1, length), queries, keys.mT, alpha=scale)
        y = torch.bmm(scores.softmax(-1), values)
        memory = memory._replace(start=max(start, memory.stop - size))
        return y.view(heads, rows, width).transpose(0, 1).reshape(rows, heads * width), memory

    return attend


def _bind_projection(
    projections: MemoryProjections, content_bias: Float[Tensor, "h e"], distance_bias: Float[Tensor, "h e"]
) -> TensorFn:
    """Queries for contents and for distances, keys and values by one product."""
    queries, keys_values = projections.queries, projections.keys_values
    weight = torch.cat([queries.weight, queries.weight, keys_values.weight])
    biases = [content_bias.flatten(), distance_bias.flatten(), weight.new_zeros(keys_values.out_features)]
    bias = torch.cat(biases)
    if queries.bias is not None and keys_values.bias is not None:
        bias = bias + torch.cat([queries.bias, queries.bias, keys_values.bias])
    return bind_rows(weight, bias)
