"""A policy with a value function for reinforcement learning: its objective, acting step by step, and the model."""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.embedding import ModelState, empty_tail, materialize_tail, positions_of
from manyformer.models.head import BatchLoss, BatchScore
from manyformer.models.model import Model
from manyformer.models.observation_embedding import ObservationEmbedding
from manyformer.nn.batches.batch import SegmentLayout
from manyformer.nn.batches.episode_batches import ClippedObjective, EpisodesToPlay, RolloutBatch
from manyformer.nn.core import (
    PADDING_SEGMENT,
    AlignedLayout,
    Context,
    Layer,
    State,
    TokenPositions,
    WatchFn,
    apply_layer,
    no_watch,
)
from manyformer.nn.decoding.acting_step import bind_rows, end_acting
from manyformer.nn.decoding.bound_step import bind_step
from manyformer.nn.runtime.torch_internals import is_plain

MIN_ADVANTAGE_STD = 1e-3
"""Advantages with a smaller deviation are not normalized."""


POLICY_HEAD_STD = 0.01
"""The initial deviation of the policy head, with which all actions are about equally likely."""


class StepLosses(NamedTuple):
    """The parts of the objective, one number for each step: what is minimized is their weighted sum."""

    policy: Float[Tensor, "b l"]
    value: Float[Tensor, "b l"]
    entropy: Float[Tensor, "b l"]

    def total(self, objective: ClippedObjective) -> Float[Tensor, "b l"]:
        """The objective of each step."""
        return self.policy + objective.value_weight * self.value - objective.entropy_weight * self.entropy


def policy_loss(
    log_probs: Float[Tensor, "b l"],
    acting_log_probs: Float[Tensor, "b l"] | None,
    advantages: Float[Tensor, "b l"],
    clip: float,
) -> Float[Tensor, "b l"]:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon) A) with r the ratio of the probabilities of an action now and then.

    Schulman et al. 2017, arXiv:1707.06347, equation 7. Without the log-probabilities of the acting policy it is that
    of the policy gradient, -A log p (Williams 1992)."""
    if acting_log_probs is None:
        return -advantages * log_probs
    # one as long as the policy has not changed since the rollout
    ratio = (log_probs - acting_log_probs).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)


def normalize_advantages(advantages: Float[Tensor, "b l"], valid: Bool[Tensor, "b l"]) -> Float[Tensor, "b l"]:
    """Advantages with mean 0 and deviation 1 over the valid steps, unless they are nearly equal."""
    count = valid.sum().clamp(min=1)
    centered = advantages - (advantages * valid).sum() / count
    std = ((centered.square() * valid).sum() / count).sqrt()
    return torch.where(std < MIN_ADVANTAGE_STD, advantages, centered / std.clamp(min=MIN_ADVANTAGE_STD))


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
        self._heads = _bind_heads(policy_head, value_head)
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
        self._position_ids = position_ids
        self._segment_ids = segments
        self._columns += 1
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


def _bind_heads(policy_head: nn.Linear, value_head: nn.Linear) -> Callable[[Tensor], Tensor]:
    """Both heads as one product, where each is a matrix and nothing else."""
    if not (is_plain(policy_head, nn.Linear) and is_plain(value_head, nn.Linear)):
        return lambda x: torch.cat([policy_head(x), value_head(x)], -1)
    weight = torch.cat([policy_head.weight, value_head.weight])
    return bind_rows(weight, torch.cat([policy_head.bias, value_head.bias]))


class PolicyOutput(NamedTuple):
    """The logits of actions, or the means of a normal distribution, and the values of the states."""

    logits: Float[Tensor, "b l n"]
    values: Float[Tensor, "b l"]
    state: State = None
    loss: Tensor | float = 0.0


@final
class PolicyModel(Model[RolloutBatch]):
    """The distribution of the next action and the value of the state at each step, from all steps so far.

    `actions` is the number of actions, or of the numbers of an action if `continuous`: a normal distribution with a
    mean for each step and one deviation for all. `segments` numbers the episodes of each row in ascending order, None
    means one episode per row; a step sees only its own episode. With a state from `init_state` or an earlier call the
    rows are continued. Acting step by step (`begin_acting`) equals `forward` over all steps."""

    # an actor in float32 and a learner in bfloat16 would give the same action two probabilities
    allows_autocast = False

    def __init__(self, embed: ObservationEmbedding, body: Layer, actions: int, *, continuous: bool) -> None:
        super().__init__()
        self.embed = embed
        self.body = body
        self.actions = actions
        self.continuous = continuous
        self.policy_head = nn.Linear(embed.dim, actions)
        self.value_head = nn.Linear(embed.dim, 1)
        nn.init.normal_(self.policy_head.weight, std=POLICY_HEAD_STD * embed.dim**-0.5)
        nn.init.normal_(self.value_head.weight, std=embed.dim**-0.5)
        for head in (self.policy_head, self.value_head):
            nn.init.zeros_(head.bias)
        self.log_std = nn.Parameter(torch.zeros(actions)) if continuous else None

    def forward(
        self,
        observations: Shaped[Tensor, "b l *shape"],
        segments: Int64[Tensor, "b l"] | None = None,
        state: ModelState | None = None,
        previous_actions: Shaped[Tensor, "b l *a"] | None = None,
        previous_rewards: Float[Tensor, "b l"] | None = None,
        *,
        watch: WatchFn = no_watch,
    ) -> PolicyOutput:
        x = self.embed(observations, previous_actions, previous_rewards)
        return self._run_steps(x, segments, state, watch=watch)

    def _run_steps(
        self,
        x: Float[Tensor, "b l d"],
        segments: Int64[Tensor, "b l"] | None,
        state: ModelState | None,
        *,
        layout: SegmentLayout = None,
        watch: WatchFn = no_watch,
    ) -> PolicyOutput:
        """The outputs for embedded steps; `layout` is what a batch knows of the segments."""
        columns = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        positions, tail = positions_of(columns, segments, None if state is None else state.tail, layout)
        y, body, loss = apply_layer(self.body, x, Context(positions, watch=watch), state and state.body)
        next_state = None if tail is None else ModelState(body, tail)
        return PolicyOutput(self.policy_head(y), self.value_head(y)[..., 0], next_state, loss)

    def init_state(self, batch: int, *, capacity: int | None = None) -> ModelState:
        """The state before any step; `capacity` preallocates buffers, for use in `torch.no_grad()`."""
        device = self.device
        body = self.body.init_state(batch, capacity=capacity, device=device, dtype=self.state_dtype)
        return ModelState(body, materialize_tail(empty_tail(batch, device)))

    @torch.no_grad()
    def begin_acting(self, state: ModelState) -> PolicyActor:
        """The policy bound to its current weights, which continues from `state` step by step without gradients."""
        return PolicyActor(self.embed, self.body, self.policy_head, self.value_head, state)

    def distribution(self, logits: Float[Tensor, "*b n"]) -> torch.distributions.Distribution:
        """The distribution of an action: categorical, or an independent normal for each of its numbers."""
        if self.log_std is None:
            return torch.distributions.Categorical(logits=logits, validate_args=False)
        normal = torch.distributions.Normal(logits, self.log_std.exp().expand_as(logits), validate_args=False)
        return torch.distributions.Independent(normal, 1, validate_args=False)

    def loss(self, batch: RolloutBatch, *, label_smoothing: float = 0.0, state: State = None) -> BatchLoss:
        """The objective of the batch, summed over its steps. Raises UserError for label smoothing."""
        if label_smoothing:
            raise UserError(f"loss.label_smoothing ({label_smoothing}) must be 0: a policy has no labels")
        output = self._outputs(batch)
        valid = batch.segments != PADDING_SEGMENT
        # padding may hold any number, NaN too
        total = torch.where(valid, self._step_losses(batch, output, valid).total(batch.objective), 0.0).sum()
        return BatchLoss(total, valid.sum(), output.loss)

    def score(self, batch: RolloutBatch | EpisodesToPlay, *, state: State = None) -> BatchScore:
        """The negative log-likelihood of the actions, and how many of them were the likeliest.

        Held-out episodes are played instead, with the sums of their returns in `others`.
        """
        # held-out episodes have no targets: their seeds are counted instead
        if isinstance(batch, EpisodesToPlay):
            zero = torch.zeros(())
            return BatchScore(zero, torch.tensor(len(batch.seeds)), zero, others=batch.score_sums(self))
        output = self._outputs(batch)
        valid = batch.segments != PADDING_SEGMENT
        nll = -torch.where(valid, self._log_probs(output.logits, batch.actions), 0.0).sum()
        is_best = output.logits.argmax(-1) == batch.actions if self.log_std is None else torch.zeros_like(valid)
        return BatchScore(nll.cpu().double(), valid.sum(), (valid & is_best).sum())

    def _outputs(self, batch: RolloutBatch) -> PolicyOutput:
        x = self.embed(batch.observations, batch.previous_actions, batch.previous_rewards)
        return self._run_steps(x, batch.segments, batch.state, layout=batch.layout)

    def _log_probs(self, logits: Float[Tensor, "b l n"], actions: Shaped[Tensor, "b l *a"]) -> Float[Tensor, "b l"]:
        distribution: Any = self.distribution(logits)
        log_probs: Tensor = distribution.log_prob(actions)
        return log_probs

    def _step_losses(self, batch: RolloutBatch, output: PolicyOutput, valid: Tensor) -> StepLosses:
        """The parts of the objective of a batch with these outputs."""
        # advantages were computed on the host, in its precision
        advantages = batch.advantages.to(output.values)
        if batch.objective.normalize_advantages:
            advantages = normalize_advantages(advantages, valid)
        log_probs = self._log_probs(output.logits, batch.actions)
        policy = policy_loss(log_probs, batch.log_probs, advantages, batch.objective.clip)
        value = (output.values - batch.returns).square()
        distribution: Any = self.distribution(output.logits)
        return StepLosses(policy, value, distribution.entropy())
