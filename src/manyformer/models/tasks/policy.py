"""The task of acting in environments so that the sum of rewards is large."""

import math
from collections.abc import Callable, Mapping
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Generator, Tensor

from manyformer.base.spaces import PixelSpace
from manyformer.models import ModelOutput, PolicyModel
from manyformer.models.generative_model import NextTokenFn
from manyformer.models.policy_model import PolicyActor
from manyformer.models.scores import ScoreKind, mean_length, mean_return, success_rate
from manyformer.models.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.models.tasks.task import ScoreSums, Task
from manyformer.models.tasks.toy import STAND_IN_IDS, Toy, ToyDraw, stand_in_vectors
from manyformer.nn.batches import TextUnits
from manyformer.nn.batches.episode_batches import ClippedObjective, EpisodesToPlay, RolloutBatch
from manyformer.nn.core import MemorySequence, State, WatchFn, no_watch
from manyformer.nn.model_inputs import Inputs

GUESSED_SIGN_LOSS = 0.5 * math.log(2 * math.pi) + 0.5
"""The loss of an action of -1 or 1 under the normal distribution with mean 0 and deviation 1."""


@final
class PolicyTask(Task[PolicyModel]):
    """Acts in environments; where a task is given tokens, each stands for an observation, an action and a reward.

    Logits are those of the actions, and the value as one number more."""

    name = "policy"
    title = "acting in environments"
    model = PolicyModel
    data_forms: Mapping[str, str] = {"environment": "episodes"}
    reasons: Mapping[str, str] = {
        "cross_attention": "a policy reads one sequence of observations only",
        "cross_entropy": "a policy is trained by rewards, not by right answers",
    }
    metrics: Mapping[str, bool] = {"return": False}
    score_kinds: Mapping[str, ScoreKind] = {
        "return": ScoreKind(digits=3),
        "success": ScoreKind("%", digits=1),
        "episode_length": ScoreKind("steps", lower_is_better=True, digits=1),
    }

    def token_ids(self, model: PolicyModel) -> int:
        return STAND_IN_IDS

    def arguments(self, model: PolicyModel, inputs: Inputs) -> tuple[Any, ...]:
        previous_actions, previous_rewards = _stand_in_inputs(model, inputs.tokens)
        return _observations(model, inputs.tokens), inputs.segments, None, previous_actions, previous_rewards

    def call(
        self, model: PolicyModel, inputs: Inputs, state: State = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        observations, segments, _, *previous_inputs = self.arguments(model, inputs)
        logits, values, state, loss = model(observations, segments, state, *previous_inputs, watch=watch)
        return ModelOutput(torch.cat([logits, values[..., None]], -1), state, loss)

    def init_state(self, model: PolicyModel, inputs: Inputs, *, capacity: int | None = None) -> State:
        return model.init_state(inputs.tokens.shape[0], capacity=capacity)

    def one_token_step(self, model: PolicyModel) -> Callable[[], NextTokenFn]:
        """A function that makes the steps of an actor."""
        return lambda: _ActorSteps(self, model)

    def batch(self, model: PolicyModel, inputs: Inputs, targets: Tensor) -> RolloutBatch:
        observations, segments, _, previous_actions, previous_rewards = self.arguments(model, inputs)
        ones = torch.ones(targets.shape, device=targets.device)
        return RolloutBatch(
            observations,
            _actions(model, targets),
            advantages=ones,
            returns=ones,
            segments=torch.zeros_like(inputs.tokens) if segments is None else segments,
            previous_actions=previous_actions,
            previous_rewards=previous_rewards,
            objective=ClippedObjective(normalize_advantages=False),
        )

    def random_targets(self, model: PolicyModel, inputs: Inputs, generator: Generator) -> Int[Tensor, "b l"]:
        targets = torch.randint(model.actions, inputs.tokens.shape, generator=generator)
        return targets.to(inputs.tokens.device)

    def toy(self, model: PolicyModel, draw: ToyDraw) -> Toy:
        """The right action is that of the observation before the last: a bandit whose arms are remembered."""
        tokens = draw.symbols(draw.length)
        batch = self.batch(model, Inputs(tokens), tokens.roll(1, dims=1))
        # the first action is a guess, for which there is no reward
        batch.advantages[:, 0] = 0
        objective = ClippedObjective(value_weight=0.0, entropy_weight=0.0, normalize_advantages=False)
        if not model.continuous:
            guessing_loss = math.log(model.actions)
        else:
            guessing_loss = model.actions * GUESSED_SIGN_LOSS
        return Toy(batch._replace(objective=objective), guessing_loss * (1 - 1 / draw.length))

    def validation(self, sums: ScoreSums, units: TextUnits | None) -> dict[str, float]:
        """Return, length and success of an episode."""
        return _episode_scores(sums)

    def evaluate(self, request: EvaluationRequest[PolicyModel]) -> EvaluationResult:
        """Mean return and length of held-out episodes, and the share of successes where the environment has any."""
        assert request.batches is not None
        played = [batch.play(request.model) for batch in request.batches if isinstance(batch, EpisodesToPlay)]
        returns, lengths = (np.concatenate(part) for part in zip(*(episodes[:2] for episodes in played), strict=True))
        successes = [episodes.successes for episodes in played if episodes.successes is not None]
        scores = [mean_return(returns), *(success_rate(part) for part in successes), mean_length(lengths)]
        return EvaluationResult(scores, f"{len(returns):,} episodes of the likeliest actions")


class _ActorSteps:
    """An actor as a `NextTokenFn`; it goes on acting as long as it is given its own last state."""

    def __init__(self, task: PolicyTask, model: PolicyModel) -> None:
        self._task = task
        self._model = model
        self._actor: PolicyActor | None = None
        self._last_state: State = None

    def __call__(self, tokens: Tensor, state: State, memory: MemorySequence | None) -> tuple[Tensor, State]:
        # another state means other rows, or a position that was gone back to
        if self._actor is None or state is not self._last_state:
            self._actor = self._model.begin_acting(state)
        observations, _, _, *previous_inputs = self._task.arguments(self._model, Inputs(tokens))
        actions, rewards = (None if part is None else part[:, 0] for part in previous_inputs)
        # the tokens continue the document of their row, which is 0 before the first of them
        logits, values = self._actor.act(observations[:, 0], state.tail.segment_ids.clamp(min=0), actions, rewards)
        self._last_state = self._actor.end()
        return torch.cat([logits, values[:, None]], -1)[:, None], self._last_state


def _episode_scores(sums: ScoreSums) -> dict[str, float]:
    """The scores of the episodes; all of them if nothing was summed, none that the environment does not have."""
    names = {"return": "return", "episode_length": "steps", "success": "success"}
    episodes = max(1.0, sums.others.get("episodes", 0.0))
    return {
        name: sums.others.get(source, 0.0) / episodes
        for name, source in names.items()
        if source in sums.others or not sums.others
    }


def _observations(model: PolicyModel, tokens: Int[Tensor, "b l"]) -> Float[Tensor, "b l *shape"]:
    space = model.embed.space
    if isinstance(space, PixelSpace):
        draw = _draw_bytes
    else:
        draw = torch.randn
    observations: Tensor = stand_in_vectors(draw, math.prod(space.shape), tokens.device)(tokens)
    return observations.view(*tokens.shape, *space.shape)


def _draw_bytes(*shape: int, generator: torch.Generator, device: str) -> Float[Tensor, "ids size"]:
    """Brightness levels as floating point numbers."""
    return torch.randint(256, shape, generator=generator, device=device).float()


def _actions(model: PolicyModel, tokens: Int[Tensor, "b l"]) -> Shaped[Tensor, "b l *a"]:
    """The action that a token stands for: its number modulo that of all actions, or a vector of that sign."""
    if not model.continuous:
        return tokens.remainder(model.actions)
    return (tokens.remainder(2) * 2.0 - 1.0)[..., None].expand(*tokens.shape, model.actions)


def _stand_in_inputs(
    model: PolicyModel, tokens: Int[Tensor, "b l"]
) -> tuple[Shaped[Tensor, "b l *a"], Float[Tensor, "b l"]] | tuple[None, None]:
    """The previous action and reward of each step, which follow from its own token; None if the model reads neither."""
    if model.embed.action is None:
        return None, None
    return _actions(model, tokens), tokens / STAND_IN_IDS - 0.5


POLICY = PolicyTask()
