"""A policy acting in an environment: what it is given at each step, and what becomes of its actions."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from numpy.typing import NDArray
from torch import Tensor
from torch.distributions import Distribution

from manyformer.base.environments import EnvironmentStep, VectorEnvironment
from manyformer.base.spaces import BoxActions, DiscreteActions
from manyformer.base.type_aliases import IntArray
from manyformer.nn.core import State

NO_ACTION = -1
"""The previous action of the first step of an episode where actions are numbered."""


class ActorStep(Protocol):
    """What an actor computes at a step: logits of actions, or means of their numbers, and values, for each row."""

    @property
    def logits(self) -> Float[Tensor, "b n"]: ...
    @property
    def values(self) -> Float[Tensor, " b"]: ...


class Actor(Protocol):
    """A policy bound to its current weights, which goes on step by step."""

    def act(
        self, observations: Tensor, segments: Tensor, previous_actions: Tensor, previous_rewards: Tensor, /
    ) -> ActorStep:
        """The outputs for the next step of each row, which is remembered."""

    def value(
        self, observations: Tensor, segments: Tensor, previous_actions: Tensor, previous_rewards: Tensor, /
    ) -> Float[Tensor, " b"]:
        """The values after these observations, which are not remembered."""

    def end(self) -> State:
        """The state after the last step."""


@runtime_checkable
class ActingPolicy(Protocol):
    """A policy as far as it acts: its state, its steps, and the distribution of its actions."""

    def init_state(self, batch: int, /) -> State:
        """The state of `batch` rows before any step."""

    def begin_acting(self, state: Any, /) -> Actor:
        """The policy bound to its current weights, going on from `state`."""

    def distribution(self, logits: Tensor, /) -> Distribution:
        """The distribution of actions with these logits."""


SelectFn = Callable[[Any], Tensor]
"""Selects actions from their distribution."""


def sample_actions(distribution: Any) -> Tensor:
    """Random actions, drawn with torch's global generator."""
    actions: Tensor = distribution.sample()
    return actions


def likeliest_actions(distribution: Any) -> Tensor:
    """The actions with the highest probability or density."""
    actions: Tensor = distribution.mode
    return actions


class PolicyInputs(NamedTuple):
    """What a policy is given at a step, one row for each episode: the numbers of episodes are segments.

    The previous action is `NO_ACTION`, or zeros for vectors, at the first step of an episode, and vectors are squashed
    to (-1, 1); the previous reward is then 0.
    """

    observations: Shaped[Tensor, "b *shape"]
    segments: Int64[Tensor, " b"]
    previous_actions: Shaped[Tensor, "b *a"]
    previous_rewards: Float[Tensor, " b"]

    def to(self, device: torch.device) -> "PolicyInputs":
        """The same inputs on a device."""
        return PolicyInputs(*(part.to(device) for part in self))


class ActedStep(NamedTuple):
    """One step: the inputs and outputs of the policy, its actions, and what the environment answered.

    `actions` are those of the policy's distribution, `environment_actions` what the environment was given.
    """

    inputs: PolicyInputs
    actions: Shaped[Tensor, "b *a"]
    log_probs: Float[Tensor, " b"]
    values: Float[Tensor, " b"]
    environment_actions: NDArray[Any]
    result: EnvironmentStep
    final_inputs: PolicyInputs
    """The inputs that follow in the same episode, also where it has ended."""


class ActingLoop:
    """Steps all rows of an environment by the actions that `select` takes from the distributions of a policy.

    A vector of actions is the hyperbolic tangent of what the policy draws, scaled to the bounds of the environment.
    """

    def __init__(self, environment: VectorEnvironment, policy: ActingPolicy, select: SelectFn) -> None:
        self.environment = environment
        self.policy = policy
        self.select = select
        self._box = environment.actions if isinstance(environment.actions, BoxActions) else None
        self.inputs: PolicyInputs | None = None

    def reset(self, seeds: IntArray) -> None:
        """Begin episode 0 of every row."""
        self.inputs = self.first_inputs(self.environment.reset(seeds))

    def step(self, actor: Actor, device: torch.device) -> ActedStep:
        """Make one step of all rows. Raises UserError for what the environment cannot do."""
        assert self.inputs is not None, "reset comes before the first step"
        inputs = self.inputs
        output = actor.act(*inputs.to(device))
        distribution: Any = self.policy.distribution(output.logits)
        actions = self.select(distribution)
        # before the squashing, whose density learning does not need: it is the same in both policies that it compares
        log_probs = distribution.log_prob(actions).cpu()
        actions = actions.cpu()
        environment_actions = self._to_environment(actions)
        result = self.environment.step(environment_actions)
        rewards = torch.from_numpy(result.rewards)
        done = torch.from_numpy(result.done)
        previous = actions if self._box is None else actions.tanh()
        # with the segments of the episode that has just ended, and not those of the next one
        final = PolicyInputs(torch.from_numpy(result.final_observations), inputs.segments, previous, rewards)
        # with the number of the next episode where one has ended
        first = self.first_inputs(result.observations)
        self.inputs = PolicyInputs(
            first.observations,
            first.segments,
            # broadcast over the numbers of an action, if it is a vector
            torch.where(done.view(-1, *[1] * (previous.ndim - 1)), first.previous_actions, previous),
            torch.where(done, 0.0, rewards),
        )
        return ActedStep(inputs, actions, log_probs, output.values.cpu(), environment_actions, result, final)

    def first_inputs(self, observations: NDArray[Any]) -> PolicyInputs:
        """The inputs of the first step of the running episodes."""
        rows = self.environment.rows
        actions = self.environment.actions
        if isinstance(actions, DiscreteActions):
            previous = torch.full((rows,), NO_ACTION)
        else:
            previous = torch.zeros(rows, actions.size)
        segments = torch.from_numpy(self.environment.episodes.copy())
        return PolicyInputs(torch.from_numpy(observations), segments, previous, torch.zeros(rows))

    def _to_environment(self, actions: Tensor) -> NDArray[Any]:
        if self._box is None:
            numbers: NDArray[Any] = actions.numpy()
            return numbers
        low = np.array(self._box.low, np.float32)
        high = np.array(self._box.high, np.float32)
        # from (-1, 1) to the bounds
        scaled: NDArray[Any] = low + (actions.tanh().numpy() + 1) / 2 * (high - low)
        # rounding may step over a bound, which environments refuse
        return scaled.clip(low, high)
