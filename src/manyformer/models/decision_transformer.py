"""The Decision Transformer: a causal model of trajectories, which predicts actions, and acting with it step by step."""

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.embedding import ModelState, StreamTail, empty_tail, positions_of
from manyformer.models.head import BoundedActionHead, ClassHead, apply_head
from manyformer.models.model import Model, ModelOutput, max_length_of
from manyformer.nn.batches.batch import SegmentLayout
from manyformer.nn.batches.episode_batches import TrajectoryBatch
from manyformer.nn.core import (
    Context,
    Layer,
    LayerOutput,
    PackedLayout,
    State,
    TokenPositions,
    WatchFn,
    apply_layer,
    no_watch,
)
from manyformer.nn.runtime.dropout import Dropout
from manyformer.nn.runtime.torch_internals import is_traced

Actions = Int[Tensor, "b l"] | Float[Tensor, "b l a"]
"""Discrete actions, -1 for none, or vectors of continuous ones in the units of the environment."""


class Trajectory(NamedTuple):
    """Time steps of episodes: the return from each step to the end, what is observed, and the action then taken."""

    returns: Float[Tensor, "b l"]
    observations: Float[Tensor, "b l f"]
    actions: Actions


@final
class TrajectoryEmbedding(nn.Module):
    """Three tokens per time step: return, observation and action, each projected and added to the step's vector.

    Chen et al. 2021, section 3 and algorithm 1: e = W x + T[t], where T is a learned table of the episode's time steps,
    and one norm after it, which all tokens share. Returns are divided by `return_scale`, observations are standardized
    by `statistics`, the mean and standard deviation of the training data (2, f). Without `has_returns` a step has two
    tokens. `offset` adds a vector to every token after the norm: that of position 0 in Hugging Face's model."""

    mean: Float[Tensor, " f"]
    std: Float[Tensor, " f"]

    def __init__(
        self,
        statistics: Float[Tensor, "2 f"],
        actions: int,
        dim: int,
        *,
        max_episode_length: int,
        return_scale: float,
        has_returns: bool,
        has_offset: bool,
        dropout: float,
    ) -> None:
        super().__init__()
        self.actions = actions
        self.return_scale = return_scale
        self.register_buffer("mean", statistics[0].clone())
        self.register_buffer("std", statistics[1].clone())
        self.timestep = nn.Embedding(max_episode_length, dim)
        nn.init.normal_(self.timestep.weight, std=0.02)
        self.embed_return = nn.Linear(1, dim) if has_returns else None
        self.embed_observation = nn.Linear(statistics.shape[1], dim)
        self.embed_action = nn.Linear(actions, dim)
        self.norm = nn.LayerNorm(dim)
        self.dropout = Dropout(dropout)
        self.offset = nn.Parameter(torch.zeros(dim)) if has_offset else None

    @property
    def tokens_per_step(self) -> int:
        if self.embed_return is None:
            return 2
        return 3

    def forward(self, steps: Trajectory, timesteps: Int[Tensor, "b l"]) -> Float[Tensor, "b tokens d"]:
        """The tokens of all steps in the order return, observation, action; actions are vectors here."""
        time = self.time_vectors(timesteps)
        tokens = [*self.observed(steps.returns, steps.observations, time), self.acted(steps.actions, time)]
        # stacked after the axis of steps, so that the tokens of a step are adjacent
        return self.finish(torch.stack(tokens, 2).flatten(1, 2))

    def time_vectors(self, timesteps: Int[Tensor, "b l"]) -> Float[Tensor, "b l d"]:
        """The vectors of time steps; those beyond the table count as its last."""
        # an environment may go on for longer than the training data did
        vectors: Tensor = self.timestep(timesteps.clamp(max=self.timestep.num_embeddings - 1))
        return vectors

    def observed(
        self, returns: Float[Tensor, "b l"], observations: Float[Tensor, "b l f"], time: Float[Tensor, "b l d"]
    ) -> list[Float[Tensor, "b l d"]]:
        """The tokens of the return, if there are returns, and of the observation, before the norm."""
        tokens = [self.embed_observation((observations.to(time.dtype) - self.mean) / self.std) + time]
        if self.embed_return is not None:
            tokens.insert(0, self.embed_return(returns.to(time.dtype)[..., None] / self.return_scale) + time)
        return tokens

    def acted(self, actions: Float[Tensor, "b l a"], time: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """The tokens of actions as vectors, before the norm."""
        embedded: Tensor = self.embed_action(actions.to(time.dtype))
        return embedded + time

    def finish(self, tokens: Float[Tensor, "b n d"]) -> Float[Tensor, "b n d"]:
        """The shared norm, the offset and dropout."""
        normed = self.norm(tokens)
        dropped: Tensor = self.dropout(normed if self.offset is None else normed + self.offset)
        return dropped


@final
class DecisionTransformer(Model[TrajectoryBatch]):
    """Predicts the action of each time step from its observation, the return that is to follow, and earlier steps.

    Chen et al. 2021, section 3. Any causal layer is the `body`. `logits[:, t]` are those of discrete actions (b, l, n),
    or continuous actions (b, l, a); neither depends on the action of step t. `segments` numbers the windows of packed
    rows, -1 is padding, None means one window per row; `timesteps` count from the beginning of the episode, by default
    from that of the window, and those beyond the learned table count as its last. With a state the rows are continued.
    Raises UserError if the body does not allow the tokens of `window` time steps."""

    def __init__(
        self,
        embed: TrajectoryEmbedding,
        body: Layer,
        head: ClassHead | BoundedActionHead,
        *,
        window: int,
        decodes_incrementally: bool = True,
    ) -> None:
        super().__init__()
        self.embed = embed
        self.body = body
        self.head = head
        self.window = window
        self.decodes_incrementally = decodes_incrementally
        max_tokens = max_length_of(body)
        if max_tokens is None:
            self.max_length = None
        else:
            self.max_length = max_tokens // embed.tokens_per_step
        if self.max_length is not None and window > self.max_length:
            raise UserError(
                f"window ({window}) must be at most {self.max_length}: the body allows {max_tokens} tokens, "
                f"{embed.tokens_per_step} of them for each time step"
            )

    def forward(
        self,
        returns: Float[Tensor, "b l"],
        observations: Float[Tensor, "b l f"],
        actions: Actions,
        segments: Int[Tensor, "b l"] | None = None,
        state: ModelState | None = None,
        *,
        timesteps: Int[Tensor, "b l"] | None = None,
        watch: WatchFn = no_watch,
    ) -> ModelOutput:
        steps = Trajectory(returns, observations, actions)
        hidden, next_state, loss = self._hidden(steps, timesteps, segments, state, watch=watch)
        return ModelOutput(apply_head(self.head, hidden), next_state, loss)

    def head_inputs(self, batch: TrajectoryBatch, state: State) -> tuple[LayerOutput, Tensor]:
        steps = Trajectory(batch.returns, batch.observations, batch.actions)
        return self._hidden(steps, batch.timesteps, batch.segments, state, layout=batch.layout), batch.targets

    def init_state(self, batch: int, *, capacity: int | None = None) -> ModelState:
        """The state before any time step; `capacity` preallocates buffers for as many steps."""
        tokens = None
        if capacity is not None:
            tokens = capacity * self.embed.tokens_per_step
        device = self.device
        body = self.body.init_state(batch, capacity=tokens, device=device, dtype=self.state_dtype)
        return ModelState(body, empty_tail(batch, device))

    def action_vectors(self, actions: Actions) -> Float[Tensor, "b l a"]:
        """Actions as they are embedded: continuous ones from -1 to 1, discrete ones as one-hot vectors, none as 0."""
        if isinstance(self.head, BoundedActionHead):
            return self.head.normalize(actions)
        # no action is -1, which is none of the numbers
        numbers = torch.arange(self.embed.actions, device=actions.device)
        return (actions[..., None] == numbers).to(self.embed.mean)

    @property
    def has_bounded_actions(self) -> bool:
        """Whether actions are vectors of numbers in a box, not discrete."""
        return isinstance(self.head, BoundedActionHead)

    def no_actions(self, rows: int) -> Tensor:
        """Actions of one step that are not taken: -1, or the middle of the box."""
        if isinstance(self.head, BoundedActionHead):
            return ((self.head.low + self.head.high) / 2).expand(rows, -1)
        return torch.full((rows,), -1, device=self.device)

    def run_tokens(
        self,
        tokens: Float[Tensor, "b n d"],
        positions: TokenPositions,
        tail: StreamTail | None,
        state: ModelState | None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        """The body's output for embedded tokens, which continue those of the state; `tail` is that after them."""
        y, body_state, loss = apply_layer(self.body, tokens, Context(positions, watch=watch), state and state.body)
        return LayerOutput(y, None if tail is None else ModelState(body_state, tail), loss)

    def _hidden(
        self,
        steps: Trajectory,
        timesteps: Int[Tensor, "b l"] | None,
        segments: Int[Tensor, "b l"] | None,
        state: ModelState | None,
        *,
        layout: SegmentLayout = None,
        watch: WatchFn = no_watch,
    ) -> LayerOutput:
        """The hidden states of the observations' tokens (b, l, d)."""
        width = self.embed.tokens_per_step
        rows, length = steps.returns.shape
        self.check_length(length)
        self._check_form(steps)
        # a window of steps is a document of `width` times as many tokens
        token_segments = None if segments is None else segments.repeat_interleave(width, 1)
        token_layout = layout.repeated(width) if isinstance(layout, PackedLayout) else layout
        positions, tail = stream_positions(rows, length * width, self.device, token_segments, state, token_layout)
        if timesteps is None:
            # the first token of each step, counted in steps
            timesteps = positions.position_ids[:, ::width] // width
        tokens = self.embed(steps._replace(actions=self.action_vectors(steps.actions)), timesteps)
        hidden = self.run_tokens(tokens, positions, tail, state, watch)
        # the observation is the last token before the action: after one return or none
        return LayerOutput(hidden.y[:, width - 2 :: width], hidden.state, hidden.loss)

    def _check_form(self, steps: Trajectory) -> None:
        """Raise UserError for observations and actions that the model was not built for."""
        observed = steps.observations.shape[-1]
        has_vectors = steps.actions.is_floating_point()
        if observed != len(self.embed.mean):
            raise UserError(f"an observation has {observed} numbers, and this model reads {len(self.embed.mean)}")
        if has_vectors != self.has_bounded_actions:
            kinds = ("discrete", "continuous")
            raise UserError(f"the actions are {kinds[has_vectors]}, and those of this model {kinds[not has_vectors]}")
        if has_vectors and steps.actions.shape[-1] != self.embed.actions:
            raise UserError(f"an action has {steps.actions.shape[-1]} numbers, and this model has {self.embed.actions}")
        # other devices than a CPU would have to wait for the answer
        if has_vectors or steps.actions.device.type != "cpu" or is_traced():
            return
        if steps.actions.numel() and (largest := int(steps.actions.max())) >= self.embed.actions:
            raise UserError(f"the action {largest} occurs, and those of this model are 0 to {self.embed.actions - 1}")


def stream_positions(
    rows: int,
    tokens: int,
    device: torch.device,
    segments: Int[Tensor, "b n"] | None,
    state: ModelState | None,
    layout: SegmentLayout = None,
) -> tuple[TokenPositions, StreamTail | None]:
    """The positions of so many tokens in each row, which continue those of the state, and the tail after them."""
    token_ids = torch.zeros(rows, tokens, dtype=torch.long, device=device)
    return positions_of(token_ids, segments, None if state is None else state.tail, layout)


def observation_statistics(
    observations: int, mean: Sequence[float] | None, std: Sequence[float] | None
) -> Float[Tensor, "2 f"]:
    """The mean and standard deviation of observations, 0 and 1 by default. Raises UserError for others than numbers."""
    rows = []
    for name, values, default in (("observation_mean", mean, 0.0), ("observation_std", std, 1.0)):
        if values is None:
            row = [default] * observations
        else:
            row = list(values)
        if len(row) != observations:
            raise UserError(f"{name} has {len(row)} numbers, and there are {observations} observations")
        if not all(map(math.isfinite, row)) or (name == "observation_std" and min(row) <= 0):
            raise UserError(f"{name} must be finite numbers, standard deviations above 0, and is {values}")
        rows.append(row)
    return torch.tensor(rows)


@final
class EpisodeDecoder:
    """The actions of episodes that begin together, a row each, from the last `window` time steps of the model.

    It equals the model applied to these steps alone in every call (Chen et al. 2021, algorithm 1). The keys of deeper
    layers depend on all steps that their layer saw, so a cache serves only while the episode fits into the window, with
    as many tokens per call as a time step has; after that, and for bodies without exact incremental decoding, the
    window is computed again. For use without gradients, in evaluation mode."""

    def __init__(self, model: DecisionTransformer, rows: int) -> None:
        self._model = model
        self._num_steps = 0
        if model.decodes_incrementally:
            self._state: ModelState | None = model.init_state(rows)
        else:
            self._state = None
        self._returns = deque[Tensor](maxlen=model.window)
        self._observations = deque[Tensor](maxlen=model.window)
        self._actions = deque[Tensor](maxlen=model.window)

    def step(
        self, returns: Float[Tensor, " b"], observations: Float[Tensor, "b f"], previous_actions: Tensor | None = None
    ) -> Float[Tensor, "b n"]:
        """The logits of the next actions, given the returns that are to follow and what is observed now.

        `previous_actions` are those taken at the step before, None only at the first step."""
        assert (previous_actions is None) == (self._num_steps == 0)
        self._returns.append(returns)
        self._observations.append(observations)
        if previous_actions is not None:
            self._actions.append(previous_actions)
        self._num_steps += 1
        if self._num_steps > self._model.window:
            # from now on the window slides, and cached keys of deeper layers depend on steps that have left it
            self._state = None
        if self._state is None:
            return self._recompute()
        return self._continue(self._state, returns[:, None], observations[:, None], previous_actions)

    def _continue(
        self,
        state: ModelState,
        returns: Float[Tensor, "b 1"],
        observations: Float[Tensor, "b 1 f"],
        previous_actions: Tensor | None,
    ) -> Float[Tensor, "b n"]:
        """The logits from the tokens that are new: the previous action, the return and the observation."""
        model = self._model
        embed = self._model.embed
        rows = len(returns)
        tokens = embed.observed(returns, observations, embed.time_vectors(self._timesteps(rows, 1)))
        if previous_actions is not None:
            previous_time = embed.time_vectors(self._timesteps(rows, 1) - 1)
            # the action of the step before has its own vector of time, that of the step in which it was taken
            tokens.insert(0, embed.acted(model.action_vectors(previous_actions[:, None]), previous_time))
        positions, tail = stream_positions(rows, len(tokens), model.device, None, state)
        hidden = model.run_tokens(embed.finish(torch.cat(tokens, 1)), positions, tail, state)
        self._state = hidden.state
        return apply_head(model.head, hidden.y[:, -1])

    def _recompute(self) -> Float[Tensor, "b n"]:
        """The logits from all steps of the window; no output depends on the action that is still unknown."""
        model = self._model
        length = len(self._returns)
        returns = torch.stack(tuple(self._returns), 1)
        observations = torch.stack(tuple(self._observations), 1)
        # one action less than steps, for the last one has not been taken yet
        actions = list(self._actions)[len(self._actions) - length + 1 :]
        actions.append(model.no_actions(len(returns)))
        timesteps = self._timesteps(len(returns), length)
        logits: Tensor = model(returns, observations, torch.stack(actions, 1), timesteps=timesteps).logits
        return logits[:, -1]

    def _timesteps(self, rows: int, count: int) -> Int[Tensor, "b l"]:
        """The numbers of the last `count` steps, counted from the beginning of the episode."""
        numbers = torch.arange(self._num_steps - count, self._num_steps, device=self._model.device)
        return numbers.expand(rows, -1)
