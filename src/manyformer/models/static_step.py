"""One-token decoding by the same operators at every step: whatever changes from token to token is in tensors."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn import functional as F

from manyformer.models.embedding import UNSTARTED_SEGMENT, StreamTail, TokenEmbedding, materialize_tail, positions_of
from manyformer.models.head import OutputHead
from manyformer.nn.attention.kv_cache.static_cache import NotStaticError
from manyformer.nn.core import PADDING_SEGMENT, Context, Layer, MemorySequence, State, StepLayout, TokenPositions


class StaticTail(NamedTuple):
    """The place of each row's last token, and the positions of all columns of the caches; unused ones are padding."""

    position_ids: Int[Tensor, " b"]
    segment_ids: Int[Tensor, " b"]
    column: Int[Tensor, " b"]
    key_position_ids: Int[Tensor, "b n"]
    key_segment_ids: Int[Tensor, "b n"]

    @property
    def columns(self) -> int:
        """The number of columns."""
        return self.key_position_ids.shape[1]

    def enlarged(self, columns: int) -> "StaticTail":
        """The tail with so many columns; the caches follow at the next step."""
        missing = columns - self.columns
        key_position_ids = F.pad(self.key_position_ids, (0, missing))
        key_segment_ids = F.pad(self.key_segment_ids, (0, missing), value=PADDING_SEGMENT)
        # new columns are padding until a step writes them
        return self._replace(key_position_ids=key_position_ids, key_segment_ids=key_segment_ids)


class StaticModelState(NamedTuple):
    """The state of a model between static steps: that of its layers and the places of tokens."""

    body: State
    tail: StaticTail


StaticStepFn = Callable[[Tensor, StaticModelState, MemorySequence | None], tuple[Tensor, StaticModelState]]
"""From tokens (b, 1), the state and the encoded source to logits (b, 1, v) and the next state.

A step writes caches in place, at a column that depends on the rest of the state, and returns new tensors for that."""


def static_tail(tail: StreamTail, tokens: Int[Tensor, "b t"], segments: Int[Tensor, "b t"] | None) -> StaticTail:
    """The static form of a tail after these tokens, which are all so far; as many columns as tokens."""
    position_ids, segment_ids, *_ = materialize_tail(tail)
    # rows without any token begin document 0 with the next one
    segment_ids = segment_ids.masked_fill(segment_ids == UNSTARTED_SEGMENT, 0)
    column = torch.full_like(position_ids, tokens.shape[1] - 1)
    keys, _ = positions_of(tokens, segments, None)
    key_position_ids, key_segment_ids = (ids.expand(tokens.shape).clone() for ids in keys[:2])
    return StaticTail(position_ids, segment_ids, column, key_position_ids, key_segment_ids)


def static_token_step(embed: TokenEmbedding, body: Layer, head: OutputHead, position_limit: int) -> StaticStepFn:
    """The static step of a model with these parts, for positions below the limit. Raises NotStaticError for some.

    The first step takes the states that layers keep otherwise, and returns the static ones."""
    # asked before any step: a captured graph cannot change its mind
    for module in body.modules():
        if reason := getattr(module, "no_static_step", None):
            raise NotStaticError(reason)
    reads_token_ids = any(getattr(module, "reads_token_ids", False) for module in body.modules())

    def step(tokens: Tensor, state: StaticModelState, memory: MemorySequence | None) -> tuple[Tensor, StaticModelState]:
        tail = state.tail
        position_ids = tail.position_ids + 1
        column = tail.column + 1
        for ids, new in ((tail.key_position_ids, position_ids), (tail.key_segment_ids, tail.segment_ids)):
            # in place, because a captured graph reads these very tensors at each replay
            ids.index_copy_(1, column[:1], new[:, None])
        layout = StepLayout(column, TokenPositions(tail.key_position_ids, tail.key_segment_ids), position_limit)
        positions = TokenPositions(position_ids[:, None], tail.segment_ids[:, None], layout)
        if reads_token_ids:
            positions = positions.of_tokens(tokens)
        y, body_state, _ = body(embed(tokens, positions), Context(positions, memory), state.body)
        logits: Tensor = head(y)
        return logits, StaticModelState(body_state, tail._replace(position_ids=position_ids, column=column))

    return step
