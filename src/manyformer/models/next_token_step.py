"""One-token decoding of a model, bound to its current parameters."""

from collections.abc import Callable, Iterator
from typing import final

import torch
from torch import Tensor

from manyformer.bound_step import DecodeStep, bind_step, callable_of, is_bound
from manyformer.core import Context, ContiguousLayout, Layer, MemorySequence, State, TokenPositions
from manyformer.depth.early_exit_stack import EarlyExit, EarlyExitStep
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.exit_classifiers import ExitClassifiers
from manyformer.models.head import OutputHead
from manyformer.models.token_positions import StreamTail, positions_of
from manyformer.torch_internals import has_hooks

NextTokenFn = Callable[[Tensor, State, MemorySequence | None], tuple[Tensor, State]]
"""From tokens (b, 1), the state and, for a decoder, the encoded source to logits (b, 1, v) and the next state."""

POSITIONS_PER_TABLE = 256
"""The number of positions whose tensors are made at once."""


def next_token_step(embed: TokenEmbedding, body: Layer, head: OutputHead, forward: NextTokenFn) -> NextTokenFn:
    """The step of a model with these parts; `forward` serves calls with gradients or with several tokens."""
    embed_step = callable_of(embed)
    step = _logits_step(body, head)
    positions_at = _PositionTable()

    def next_token(tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        rows, length = tokens.shape
        if length != 1 or not rows or torch.is_grad_enabled():
            return forward(tokens, state, memory)
        position_ids, segment_ids, start, _, aligned = state.tail
        if start is None:
            positions, tail = positions_of(tokens, None, state.tail)
        else:
            positions = positions_at(start, rows, tokens.device)
            tail = StreamTail(position_ids, segment_ids, start + 1, start + 1, aligned)
        logits, body_state = step(embed_step(tokens, positions), Context(positions, memory), state.body)
        return logits, type(state)(body_state, tail)

    return next_token


def forward_layers(body: Layer, name: str) -> Iterator[str]:
    """The names of the layers in `body`, itself called `name`, that are not bound: a token calls them as modules."""
    if not is_bound(body) and (has_hooks(body) or not isinstance(body, EarlyExit)):
        yield name
        return
    for child_name, child in body.named_children():
        if isinstance(child, Layer):
            yield from forward_layers(child, f"{name}.{child_name}")


def _logits_step(body: Layer, head: OutputHead) -> DecodeStep:
    """`body` and `head` as one step, whose output are the logits."""
    if isinstance(body, EarlyExit) and isinstance(head, ExitClassifiers) and not (has_hooks(body) or has_hooks(head)):
        return EarlyExitStep(body, head)
    layer_step = bind_step(body)
    logits = callable_of(head)

    def step(x: Tensor, ctx: Context, state: State) -> tuple[Tensor, State]:
        y, next_state = layer_step(x, ctx, state)
        return logits(y), next_state

    return step


@final
class _PositionTable:
    """Positions of the next token of rows that are one contiguous document each, made for many tokens at once."""

    def __init__(self) -> None:
        self._key: tuple[int, int, torch.device] | None = None
        self._position_ids = self._segment_ids = torch.empty(0)

    def __call__(self, position: int, rows: int, device: torch.device) -> TokenPositions:
        key = (position // POSITIONS_PER_TABLE, rows, device)
        if key != self._key:
            start = key[0] * POSITIONS_PER_TABLE
            self._position_ids = torch.arange(start, start + POSITIONS_PER_TABLE, device=device).expand(rows, -1)
            self._segment_ids = torch.zeros((), dtype=torch.long, device=device).expand(rows, 1)
            self._key = key
        position_ids = self._position_ids.narrow(1, position % POSITIONS_PER_TABLE, 1)
        return TokenPositions(position_ids, self._segment_ids, ContiguousLayout(position))
