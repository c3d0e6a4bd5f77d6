"""The task of predicting the actions of recorded episodes, scored also by episodes that the model itself plays."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, cast, final

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Generator, Tensor, nn

from manyformer.base.environments import VectorEnvironment, make_environment, row_seeds
from manyformer.base.errors import UserError
from manyformer.base.spaces import DiscreteActions, VectorSpace
from manyformer.models import DecisionTransformer, EpisodeDecoder, ModelOutput
from manyformer.models.decision_transformer import Trajectory
from manyformer.models.embedding import check_token_range, check_token_rows, positions_of
from manyformer.models.scores import ScoreKind, ScoreRecord, mean_return
from manyformer.models.tasks.requests import EvaluationRequest, EvaluationResult, TaskTokenizers, TextPass
from manyformer.models.tasks.task import ScoreSums, Task, likelihood
from manyformer.models.tasks.toy import ROWS, Toy, ToyDraw
from manyformer.nn.batches import IGNORE_INDEX, Batch, TextUnits, to_device
from manyformer.nn.batches.episode_batches import TrajectoryBatch
from manyformer.nn.core import State, WatchFn, no_watch
from manyformer.nn.model_inputs import Inputs

STEP_IDS = 29
"""The number of different time steps that are made of token ids: each has a return, an observation and an action."""
EVALUATION_SEED = 20210603
"""Decides the episodes that models are scored on: they are the same ones for all models."""
MAX_STEPS = 20_000
"""The number of steps after which an episode that goes on is refused."""
TargetReturn = float | NDArray[np.float64]
"""The return that the model shall reach, in all episodes or in each."""


class PlayedSection(Protocol):
    """The settings of a run's data that decide how its model is played."""

    @property
    def environment(self) -> str | None: ...
    @property
    def wanted(self) -> float | tuple[float, ...] | None: ...
    @property
    def episodes(self) -> int: ...
    @property
    def reward(self) -> str: ...


@final
class TrajectoryImitation(Task[DecisionTransformer]):
    """Predicts the action of each time step; where a model is tested with tokens, one of them is a time step."""

    name = "trajectories"
    title = "imitation of trajectories"
    model = DecisionTransformer
    data_forms: Mapping[str, str] = {"trajectories": "windows"}
    score_kinds: Mapping[str, ScoreKind] = {
        "squared_error": ScoreKind(lower_is_better=True, digits=4),
        "return": ScoreKind(digits=3),
    }
    plays_for_returns = True
    reasons: Mapping[str, str] = {"cross_attention": "it reads one sequence only"}

    def model_reasons(self, model: DecisionTransformer) -> Mapping[str, str]:
        if not model.has_bounded_actions:
            return {}
        return {"loss": "continuous actions are learned by their squared error, which is no cross entropy"}

    def token_ids(self, model: DecisionTransformer) -> int:
        return STEP_IDS

    def arguments(self, model: DecisionTransformer, inputs: Inputs) -> tuple[Any, ...]:
        return *_steps_of_tokens(model, inputs.tokens), inputs.segments

    def call(
        self, model: DecisionTransformer, inputs: Inputs, state: State = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        output: ModelOutput = model(*self.arguments(model, inputs), state, watch=watch)
        return output

    def init_state(self, model: DecisionTransformer, inputs: Inputs, *, capacity: int | None = None) -> State:
        return model.init_state(inputs.tokens.shape[0], capacity=capacity)

    def batch(self, model: DecisionTransformer, inputs: Inputs, targets: Int[Tensor, "b l"]) -> TrajectoryBatch:
        """The batch; a target of continuous actions is a vector of the class id as a fraction of all classes."""
        steps = _steps_of_tokens(model, inputs.tokens)
        tokens = inputs.tokens
        if inputs.segments is None:
            segments = torch.zeros_like(tokens)
        else:
            segments = inputs.segments
        # a window counts its time steps from its own beginning, as the model does where none are given
        timesteps = positions_of(tokens, segments, None)[0].position_ids.expand_as(tokens).clamp(min=0)
        if model.has_bounded_actions:
            fractions = targets.float().masked_fill(targets == IGNORE_INDEX, math.nan) / model.embed.actions
            return TrajectoryBatch(*steps, fractions[..., None].expand_as(steps.actions), timesteps, segments)
        return TrajectoryBatch(*steps, targets, timesteps, segments)

    def example_pass(self, model: DecisionTransformer, batch: Batch, tokenizers: TaskTokenizers) -> TextPass:
        """The first window: a return, an observation and an action for each time step."""
        assert isinstance(batch, TrajectoryBatch)
        moved: Any = to_device(batch, model.device)
        length = int((moved.segments[0] == moved.segments[0, 0]).sum())
        steps = [part[:1, :length] for part in (moved.returns, moved.observations, moved.actions)]
        timesteps = moved.timesteps[:1, :length]
        # behavior cloning has no returns, and so two tokens a step
        kinds = ("return", "observation", "action")[-model.embed.tokens_per_step :]
        labels = tuple(f"{kind} {time}" for time in timesteps[0].tolist() for kind in kinds)
        return TextPass(lambda watch: model(*steps, timesteps=timesteps, watch=watch), labels, len(labels))

    def random_targets(self, model: DecisionTransformer, inputs: Inputs, generator: Generator) -> Int[Tensor, "b l"]:
        return inputs.tokens % model.embed.actions

    def toy(self, model: DecisionTransformer, draw: ToyDraw) -> Toy:
        """Random observations and actions; the action to predict says whether the previous step's observation was high.

        Of discrete actions these are the first two, of continuous ones half the box."""
        shape = (ROWS, draw.length)
        high = torch.randint(2, shape, generator=draw.generator).to(draw.device)
        random_steps = torch.randint(STEP_IDS, shape, generator=draw.generator).to(draw.device)
        steps = _steps_of_tokens(model, random_steps)
        steps = steps._replace(observations=(2.0 * high - 1)[..., None].expand_as(steps.observations).contiguous())
        targets = high.roll(1, 1)
        targets[:, 0] = IGNORE_INDEX
        batch = self.batch(model, Inputs(random_steps), targets)._replace(observations=steps.observations)
        return Toy(batch, 0.25 / model.embed.actions**2 if model.has_bounded_actions else math.log(2))

    def validation(self, sums: ScoreSums, units: TextUnits | None) -> dict[str, float]:
        """The loss per action (nats, or the squared error of continuous actions) and the share of right actions."""
        targets = max(1, sums.targets)
        return {"loss": sums.nats / targets, "accuracy": sums.correct / targets}

    def evaluate(self, request: EvaluationRequest[DecisionTransformer]) -> EvaluationResult:
        """The loss and the accuracy of recorded actions; achieved returns if the run's data names an environment."""
        sums = likelihood(request)
        model = request.model
        name, unit = ("squared error", "half a box") if model.has_bounded_actions else ("loss", "nats")
        signature = f"per:action|actions:{sums.targets}|unit:{unit}"
        scores = [
            ScoreRecord(name, sums.nats / sums.targets, signature, 4),
            ScoreRecord("accuracy", 100 * sums.correct / sums.targets, f"per:action|actions:{sums.targets}"),
        ]
        description = f"{sums.targets:,} actions in windows of {model.window}"
        section = cast(PlayedSection, request.section)
        settings = request.settings
        environment = settings.environment or section.environment
        target_returns = settings.wanted or section.wanted
        if environment is not None and target_returns is not None:
            scores += _achieved_scores(model, section, environment, target_returns)
            description += f"; {section.episodes:,} episodes of {environment}"
        elif settings.wanted or settings.environment:
            missing = "--wanted: which returns"
            if environment is None:
                missing = "--environment NAME: where"
            raise UserError(f"the run has no data.environment; give also {missing} to play for")
        return EvaluationResult(scores, description)


def _achieved_scores(
    model: DecisionTransformer, section: PlayedSection, environment: str, target_returns: float | tuple[float, ...]
) -> list[ScoreRecord]:
    """The mean achieved return for each target return, with a confidence interval over episodes."""

    def score(target: float) -> ScoreRecord:
        delayed = section.reward == "last-step"
        return mean_return(achieved_returns(model, environment, target, section.episodes, delayed=delayed))

    if not isinstance(target_returns, tuple):
        return [score(target_returns)]
    return [replace(score(target), name=f"return for {target:g}") for target in target_returns]


def achieved_returns(
    model: DecisionTransformer, name: str, target_return: TargetReturn, episodes: int, *, delayed: bool
) -> NDArray[np.float64]:
    """The returns of `episodes` episodes in an environment, acting by the likeliest action for a target return.

    Chen et al. 2021, algorithm 1: the return to go is the target less the rewards so far; with
    `delayed` rewards, which come at the end, it stays as it is. Raises UserError for an environment whose observations
    or actions are not those of the model."""
    # all episodes are played at once, one to a row, so that the model acts for all in one step
    environment = make_environment(name, episodes)
    try:
        _check_spaces(model, environment)
        return _play(model, environment, target_return, delayed=delayed)
    finally:
        environment.close()


def _play(
    model: DecisionTransformer, environment: VectorEnvironment, target_return: TargetReturn, *, delayed: bool
) -> NDArray[np.float64]:
    rows = environment.rows
    device = model.device
    observations = environment.reset(row_seeds(EVALUATION_SEED, rows))
    decoder = EpisodeDecoder(model, rows)
    totals = np.zeros(rows)
    running = np.ones(rows, bool)
    previous = None
    for _ in range(MAX_STEPS):
        returns_to_go = target_return - (0.0 if delayed else totals)
        returns = torch.as_tensor(np.broadcast_to(returns_to_go, rows).copy(), dtype=torch.float32, device=device)
        logits = decoder.step(returns, torch.as_tensor(observations, dtype=torch.float32, device=device), previous)
        if model.has_bounded_actions:
            previous = logits
        else:
            previous = logits.argmax(-1)
        step = environment.step(previous.cpu().numpy())
        # rows go on after their episode has ended, and no longer count
        totals += step.rewards * running
        running = running & ~step.done
        observations = step.observations
        if not running.any():
            return totals
    raise UserError(f"an episode of {environment.name} has not ended after {MAX_STEPS:,} steps; limit its length")


def _check_spaces(model: DecisionTransformer, environment: VectorEnvironment) -> None:
    """Raise UserError unless the model can be played in the environment."""
    observed = len(model.embed.mean)
    name = environment.name
    if environment.observations != VectorSpace(observed):
        size = environment.observations.shape
        if len(size) == 1:
            shown = f"vectors of {size[0]} numbers"
        else:
            shown = f"images of {' x '.join(map(str, size))}"
        raise UserError(f"{name} shows {shown}, and the model reads vectors of {observed} numbers")
    actions: Any = environment.actions
    is_discrete = isinstance(actions, DiscreteActions)
    if is_discrete == model.has_bounded_actions:
        kinds = ("continuous", "discrete")
        raise UserError(f"the actions of {name} are {kinds[is_discrete]}, those of the model {kinds[not is_discrete]}")
    if actions.size != model.embed.actions:
        remedy = ""
        if is_discrete:
            remedy = f"; data.actions={actions.size} is for data in which some never occur"
        raise UserError(f"{name} has {actions.size} actions, and the model was built for {model.embed.actions}{remedy}")
    head: Any = model.head
    if not is_discrete and not (
        (head.low.cpu().numpy() >= np.asarray(actions.low) - 1e-4).all()
        and (head.high.cpu().numpy() <= np.asarray(actions.high) + 1e-4).all()
    ):
        raise UserError(f"the actions of the model reach beyond those of {name}: {actions}")


def _steps_of_tokens(model: DecisionTransformer, tokens: Int[Tensor, "b l"]) -> Trajectory:
    """Time steps made of tokens: each token id has a return, an observation and an action."""
    check_token_rows(tokens)
    check_token_range(tokens, STEP_IDS)
    embed = model.embed
    is_bounded = model.has_bounded_actions
    # a module, which contracts find and differentiate by; frozen, because its numbers are no parameters of the model
    sizes = [1, len(embed.mean), embed.actions]
    table = nn.Embedding(STEP_IDS, sum(sizes), _weight=_step_table(sum(sizes), tokens.device), _freeze=True)
    values = table(tokens).to(embed.mean)
    returns, observations, vectors = torch.split(values, sizes, -1)
    return Trajectory(returns[..., 0], observations, vectors if is_bounded else tokens % embed.actions)


def _step_table(width: int, device: torch.device) -> Tensor:
    """Different numbers from -1 to 1 for every token id."""
    ids = torch.arange(STEP_IDS, device=device, dtype=torch.float32)[:, None]
    # incommensurable, so that no two ids have equal vectors
    frequencies = 1 + torch.arange(width, device=device, dtype=torch.float32).sqrt()
    return (ids * frequencies + 1).sin()


TRAJECTORIES = TrajectoryImitation()
