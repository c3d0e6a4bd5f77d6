"""Attention of one new token per row to a segment memory, whose scores have a vector for each distance."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.binding import bind_module, bind_optional, has_hooks
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
    """Attention bound to its current parameters, without gradients; `forward` serves tokens that are not consecutive.

    None unless the position has a vector for each distance, and nothing else. The state that it returns is known to
    the step alone, until `end_acting` makes one of it that `forward` continues from as well."""
    attend, output = _bind_attention(parts), bind_module(parts.projections.outputs)
    if attend is None:
        return None

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        if not isinstance(ctx.positions.layout, ContiguousLayout | AlignedLayout):
            return forward(x, ctx, end_acting(state))
        y, memory = attend(x, ctx.positions, state.source)
        return output(y), state._replace(source=memory)

    return step


AttendMemory = Callable[[Tensor, TokenPositions, RememberedInputs | ActingMemory], tuple[Tensor, ActingMemory]]
"""From tokens (b, 1, d), their positions and the memory to the outputs of all heads (b, 1, h f) and the next memory."""


def _bind_attention(parts: MemoryAttentionParts) -> AttendMemory | None:
    projections, project_kv, position, (heads, key_dim, value_dim), size, scale = parts
    terms = None if parts.is_hooked else position.distance_terms(size, 0)
    if terms is None or terms.keys is None or terms.query_bias is None or not (terms.bias is terms.values is None):
        return None
    distance_keys, query_bias = terms.keys.mT.contiguous(), terms.query_bias[:, None]
    hidden_scores = _HiddenScores(torch.arange(size, -1, -1, device=query_bias.device), query_bias.dtype)
    norm, layers = bind_optional(projections.pre_norm), (projections.queries, projections.keys_values)
    # queries, keys and values by one product
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    widths = [heads * key_dim, heads * key_dim, heads * value_dim]

    def attend(
        x: Tensor, positions: TokenPositions, state: RememberedInputs | ActingMemory
    ) -> tuple[Tensor, ActingMemory]:
        if not isinstance(state, ActingMemory):
            state = begin_acting(state._replace(x=state.x.to(x.dtype)), positions, project_kv, size)
        rows, projected = x.shape[0], F.linear(x if norm is None else norm(x), weight, bias)
        q, k, v = (part.view(rows, heads, -1) for part in projected.split_with_sizes(widths, -1))
        memory = state.append(RememberedStep(x, positions), k.transpose(0, 1), v.transpose(0, 1))
        start, length = memory.start, memory.stop - memory.start
        keys, values = memory.k.narrow(3, start, length), memory.v.narrow(2, start, length)
        # heads first: the vectors of distances are one matrix for all rows of a head
        q = position.query(q[:, :, None], positions)[:, :, 0].transpose(0, 1)
        hidden = hidden_scores(positions, length).expand(heads, rows, length)
        distance_scores = torch.baddbmm(hidden, q + query_bias, distance_keys.narrow(2, size + 1 - length, length))
        scores = torch.baddbmm(
            distance_scores.view(heads * rows, 1, length),
            q.reshape(heads * rows, 1, -1),
            keys.flatten(0, 1),
            alpha=scale,
        )
        y = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
        memory = memory._replace(start=max(start, memory.stop - size))
        return y.view(heads, rows, -1).transpose(0, 1).reshape(rows, 1, -1), memory

    return attend


class _HiddenScores:
    """Scores -inf for keys before the first token of the document, else 0; the layers of a call share the tensor."""

    latest: tuple[TokenPositions, int, Tensor] | None = None

    def __init__(self, distances: Tensor, dtype: torch.dtype) -> None:
        self.distances, self.dtype = distances, dtype

    def __call__(self, positions: TokenPositions, length: int) -> Float[Tensor, "#b n"]:
        latest = _HiddenScores.latest
        if latest is not None and latest[0] is positions and latest[1] == length and latest[2].dtype == self.dtype:
            return latest[2]
        is_hidden = self.distances[len(self.distances) - length :] > positions.position_ids
        scores = torch.zeros(is_hidden.shape, dtype=self.dtype, device=is_hidden.device)
        scores.masked_fill_(is_hidden, -torch.inf)
        _HiddenScores.latest = positions, length, scores
        return scores
