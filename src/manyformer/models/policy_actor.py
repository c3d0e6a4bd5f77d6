"""A policy that acts in environments, one step of all rows at a time."""

from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from manyformer.attention.acting_step import bind_rows, end_acting
from manyformer.bound_step import bind_step
from manyformer.core import AlignedLayout, Context, Layer, State, TokenPositions
from manyformer.models.generative_model import ModelState
from manyformer.models.observation_embedding import ObservationEmbedding
from manyformer.models.token_positions import materialize_tail


class ActorOutput(NamedTuple):
    """The logits of actions, or the means of a normal distribution, and the values of the states of all rows."""

    logits: Float[Tensor, "b n"]
    values: Float[Tensor, " b"]


@final
class PolicyActor:
    """The layers and heads of a policy, bound to their current parameters, and the state after the steps so far.

    Segments number the episodes of each row in ascending order, from 0, over all rollouts; there is no padding. To be
    used under `torch.no_grad()` and in evaluation mode."""

    def __init__(
        self,
        embed: ObservationEmbedding,
        body: Layer,
        policy_head: nn.Linear,
        value_head: nn.Linear,
        state: ModelState,
    ) -> None:
        self._embed = embed.bind_step()
        self._step = bind_step(body)
        weights, biases = zip(*((head.weight, head.bias) for head in (policy_head, value_head)))
        self._heads = bind_rows(torch.cat(weights), torch.cat(biases))
        self._body_state = state.body
        tail = materialize_tail(state.tail)
        self._tail = tail
        self._position_ids = tail.position_ids
        self._segment_ids = tail.segment_ids
        self._columns = tail.columns

    @torch.no_grad()
    def act(
        self,
        observations: Shaped[Tensor, "b *shape"],
        segments: Int64[Tensor, " b"],
        previous_actions: Shaped[Tensor, "b *a"] | None = None,
        previous_rewards: Float[Tensor, " b"] | None = None,
    ) -> ActorOutput:
        """The outputs for the next step of each row, which is remembered."""
        position_ids = self._next_positions(segments)
        outputs, self._body_state = self._run(position_ids, observations, segments, previous_actions, previous_rewards)
        self._position_ids, self._segment_ids, self._columns = position_ids, segments, self._columns + 1
        return ActorOutput(outputs[:, :-1], outputs[:, -1])

    @torch.no_grad()
    def value(
        self,
        observations: Shaped[Tensor, "b *shape"],
        segments: Int64[Tensor, " b"],
        previous_actions: Shaped[Tensor, "b *a"] | None = None,
        previous_rewards: Float[Tensor, " b"] | None = None,
    ) -> Float[Tensor, " b"]:
        """The values of the states that follow these observations, which are not remembered."""
        position_ids = self._next_positions(segments)
        outputs, _ = self._run(position_ids, observations, segments, previous_actions, previous_rewards)
        return outputs[:, -1]

    def end(self) -> ModelState:
        """The state after the last step, from which the next rollout and its training begin."""
        tail = self._tail._replace(
            position_ids=self._position_ids, segment_ids=self._segment_ids, columns=self._columns
        )
        return ModelState(end_acting(self._body_state), tail)

    def _next_positions(self, segments: Int64[Tensor, " b"]) -> Int64[Tensor, " b"]:
        """The number of earlier steps of the episode."""
        return (self._position_ids + 1) * (segments == self._segment_ids)

    def _run(
        self,
        position_ids: Int64[Tensor, " b"],
        observations: Tensor,
        segments: Int64[Tensor, " b"],
        previous_actions: Tensor | None,
        previous_rewards: Tensor | None,
    ) -> tuple[Float[Tensor, "b n"], State]:
        """The outputs of both heads, and the next state of the layers."""
        layout = None
        if self._tail.aligned:
            layout = AlignedLayout(self._columns)
        positions = TokenPositions(position_ids[:, None], segments[:, None], layout)
        x = self._embed(observations, previous_actions, previous_rewards)
        y, body_state = self._step(x[:, None], Context(positions), self._body_state)
        return self._heads(y[:, 0]), body_state
