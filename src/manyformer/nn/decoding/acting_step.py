"""Acting with a segment memory: attention of one step after another, for which keys and values are projected once.

The states of such a layer hold its inputs, because training continues from them with other weights. A rollout of a
policy acts many times with the same ones.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.attention.attention import Attention
from manyformer.nn.attention.kv_cache.kv_source import ProjectKV
from manyformer.nn.attention.kv_cache.segment_memory import RememberedInputs, SegmentMemorySource, join_positions
from manyformer.nn.core import AlignedLayout, Context, ContiguousLayout, State, TokenPositions
from manyformer.nn.masks import Causal, Window
from manyformer.nn.runtime.torch_internals import has_hooks, is_plain
from manyformer.nn.softmax.softmax_kernel import SoftmaxKernel

MIN_STEPS = 128
"""The number of steps, or that of the memory if it is larger, after which keys and values move to new buffers."""


class RememberedStep(NamedTuple):
    """The input of a layer at one step, and its positions."""

    x: Float[Tensor, "b 1 d"]
    positions: TokenPositions


class ActingMemory(NamedTuple):
    """`RememberedInputs`, the steps since then, and keys and values of both in a buffer that is written in place.

    The columns `start` to `stop` are in use; `keys` and `values` are views of the buffer. The head axis comes first,
    because vectors of distances belong to a head. `steps` is shared by successive states, each of which has the first
    `num_steps`."""

    buffer: Float[Tensor, "kv h b capacity e"]
    keys: Float[Tensor, "hb capacity e"]
    values: Float[Tensor, "hb capacity e"]
    remembered: RememberedInputs
    steps: list[RememberedStep]
    num_steps: int
    start: int
    stop: int

    def inputs(self) -> RememberedInputs:
        """The last inputs of the layer, as many as columns are in use."""
        steps = self.steps[: self.num_steps]
        length = self.stop - self.start
        x = torch.cat([self.remembered.x, *(step.x for step in steps)], 1)
        position_ids = torch.cat([self.remembered.position_ids, *(step.positions.position_ids for step in steps)], 1)
        segment_ids = torch.cat([self.remembered.segment_ids, *(step.positions.segment_ids for step in steps)], 1)
        # the oldest inputs have left the memory, though not the list of steps
        return RememberedInputs(*(part[:, part.shape[1] - length :] for part in (x, position_ids, segment_ids)))

    def append(self, step: RememberedStep, keys_values: Float[Tensor, "kv h b e"]) -> "ActingMemory":
        """The memory with one more step, which earlier states do not see."""
        memory = self
        if self.stop == self.buffer.shape[3]:
            length = self.stop - self.start
            memory = memory_of_columns(self.buffer.narrow(3, self.start, length), self.inputs(), length)
        memory.buffer.select(3, memory.stop).copy_(keys_values)
        # another state may have gone on from here: its steps are none of this one
        del memory.steps[memory.num_steps :]
        memory.steps.append(step)
        return memory._replace(num_steps=memory.num_steps + 1, stop=memory.stop + 1)


def memory_of_columns(columns: Float[Tensor, "kv h b n e"], remembered: RememberedInputs, size: int) -> ActingMemory:
    """A new memory of at most `size` inputs, with these keys and values, and room for further steps."""
    *sizes, length, width = columns.shape
    buffer = columns.new_empty(*sizes, size + max(size, MIN_STEPS), width)
    buffer.narrow(3, 0, length).copy_(columns)
    # views with heads and rows as one axis, as batched products take them
    keys, values = buffer.flatten(1, 2).unbind()
    return ActingMemory(buffer, keys, values, remembered, [], 0, 0, length)


def begin_acting(
    remembered: RememberedInputs, positions: TokenPositions, project: ProjectKV, size: int
) -> ActingMemory:
    """The memory of these inputs, projected by the current weights, for steps with such positions."""
    length = remembered.x.shape[1]
    # at the places before the new tokens, as `forward` would see them
    keys_values = project(remembered.x, join_positions(*remembered[1:], positions).columns(0, length))
    return memory_of_columns(torch.stack(keys_values).transpose(1, 2), remembered, size)


def end_acting(state: State) -> State:
    """The state with the inputs of each layer in place of its memory while acting."""
    if isinstance(state, ActingMemory):
        return state.inputs()
    if isinstance(state, list | tuple):
        children = [end_acting(child) for child in state]
        if hasattr(state, "_fields"):
            return type(state)(*children)
        return type(state)(children)
    return state


def acting_step(layer: Attention) -> Callable[[Tensor, Context, State], tuple[Tensor, State]] | None:
    """Attention bound to its current parameters, for consecutive tokens; `forward` serves all other calls.

    None unless a query sees exactly the remembered inputs and its own, and the position has a vector for each distance,
    and nothing else. The state that it returns is known to the step alone, until `end_acting` makes one of it that
    `forward` continues from as well."""
    attend = _bind_attention(layer)
    out_proj = layer.out_proj
    if attend is None:
        return None
    output = bind_rows(out_proj.weight, out_proj.bias)

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        is_consecutive = isinstance(ctx.positions.layout, ContiguousLayout | AlignedLayout)
        # `forward` knows the inputs alone, so that the memory of steps ends here
        if not (is_consecutive and isinstance(state.source, RememberedInputs | ActingMemory)):
            y, next_state, _ = layer(x, ctx, end_acting(state))
            return y, next_state
        y, memory = attend(x, ctx.positions, state.source)
        return output(y)[:, None], state._replace(source=memory)

    return step


def bind_rows(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The linear map of rows (b, d) with these weights."""
    transposed = transposed_copy(weight)
    if bias is None:
        return lambda x: torch.mm(x, transposed)
    return lambda x: torch.addmm(bias, x, transposed)


def transposed_copy(weight: Tensor) -> Tensor:
    """The transposed matrix, contiguous: a product with many short rows then takes half as long on a CPU."""
    return weight.t().contiguous()


AttendMemory = Callable[[Tensor, TokenPositions, RememberedInputs | ActingMemory], tuple[Tensor, ActingMemory]]
"""From tokens (b, 1, d), their positions and the memory to the outputs of all heads (b, h f) and the next memory."""


def _can_bind(layer: Attention, source: SegmentMemorySource, kernel: SoftmaxKernel) -> bool:
    """Whether a layer has only what its bound step knows: equal heads, a plain mask, no gates, no hooks."""
    heads, width, value_width = layer.kv_shape
    if not source.keeps_inputs or kernel.mask not in (Causal(), Window(source.size + 1)):
        return False
    # one buffer holds keys and values of all heads, which must therefore be alike
    if layer.q_proj is None or not layer.heads == heads == layer.key_heads or value_width != width:
        return False
    others = layer.head_gates, layer.short_convolution, layer.output_stage, layer.value_stages
    if any(part is not None for part in others) or has_hooks(layer.position):
        return False
    is_called = layer.pre_norm is not None and has_hooks(layer.pre_norm)
    projections = layer.q_proj, layer.kv_proj, layer.out_proj
    return not is_called and all(is_plain(projection, nn.Linear) for projection in projections)


def _bind_attention(layer: Attention) -> AttendMemory | None:
    source = layer.source
    kernel = layer.kernel
    if not isinstance(source, SegmentMemorySource) or not isinstance(kernel, SoftmaxKernel) or kernel.path != "auto":
        return None
    if not _can_bind(layer, source, kernel):
        return None
    size = source.size
    heads, width, _ = layer.kv_shape
    scale = kernel.score_scale(width)
    project_kv = layer.project_kv
    norm = layer.pre_norm
    # the vectors of all distances that occur: the memory's length and less
    terms = layer.position.distance_terms(size, 0)
    content_bias = layer.position.query_vector
    if terms is None or content_bias is None:
        return None
    if terms.keys is None or terms.query_bias is None or not (terms.bias is terms.values is None):
        return None
    # (h, e, size + 1): the last column is distance 0
    distance_keys = terms.keys.mT.contiguous()
    distances = torch.arange(size, -1, -1, device=distance_keys.device)
    visible_score = distance_keys.new_tensor(0.0)
    hidden_score = distance_keys.new_tensor(-torch.inf)
    # both biases are added by the projection itself, and cost no operator
    project = _bind_projection(layer, content_bias, content_bias + terms.query_bias)

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
        start = memory.start
        length = memory.stop - memory.start
        keys = memory.keys.narrow(1, start, length)
        values = memory.values.narrow(1, start, length)
        # the keys of earlier documents are farther away than the first token of this one
        is_hidden = distances[size + 1 - length :] > positions.position_ids
        # added by the product of distances, in one operator with it
        mask = torch.where(is_hidden, hidden_score, visible_score).expand(heads, rows, length)
        distance_scores = torch.baddbmm(mask, distance_queries, distance_keys.narrow(2, size + 1 - length, length))
        queries = content_queries.reshape(heads * rows, 1, width)
        scores = torch.baddbmm(distance_scores.view(heads * rows, 1, length), queries, keys.mT, alpha=scale)
        y = torch.bmm(scores.softmax(-1), values)
        # the token itself stays for the next step, and the oldest one goes
        memory = memory._replace(start=max(start, memory.stop - size))
        return y.view(heads, rows, width).transpose(0, 1).reshape(rows, heads * width), memory

    return attend


def _bind_projection(
    layer: Attention, content_bias: Float[Tensor, "h e"], distance_bias: Float[Tensor, "h e"]
) -> Callable[[Tensor], Tensor]:
    """Queries for contents and for distances, keys and values by one product."""
    queries = layer.q_proj
    keys_values = layer.kv_proj
    assert queries is not None
    # queries twice, once for each of the two biases
    weight = torch.cat([queries.weight, queries.weight, keys_values.weight])
    biases = [content_bias.flatten(), distance_bias.flatten(), weight.new_zeros(keys_values.out_features)]
    bias = torch.cat(biases)
    if queries.bias is not None and keys_values.bias is not None:
        bias = bias + torch.cat([queries.bias, queries.bias, keys_values.bias])
    return bind_rows(weight, bias)
