"""Episodes that a Decision Transformer plays for a return that is wanted."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.environments import VectorEnvironment, make_environment, row_seeds
from manyformer.errors import UserError
from manyformer.models import DecisionTransformer, EpisodeDecoder
from manyformer.spaces import DiscreteActions, VectorSpace

EVALUATION_SEED = 20210603
"""Decides the episodes that models are scored on: they are the same ones for all models."""
MAX_STEPS = 20_000
"""The number of steps after which an episode that goes on is refused."""

WantedReturn = float | NDArray[np.float64]
"""The return that is wanted of all episodes, or of each."""


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


def achieved_returns(
    model: DecisionTransformer, name: str, wanted: WantedReturn, episodes: int, *, delayed: bool
) -> NDArray[np.float64]:
    """The returns of `episodes` episodes in an environment, acting by the likeliest action for the `wanted` return.

    Chen et al. 2021, algorithm 1: the return that is still to follow is the wanted one less the rewards so far; with
    `delayed` rewards, which come at the end, it stays as it is. Raises UserError for an environment whose observations
    or actions are not those of the model."""
    environment = make_environment(name, episodes)
    try:
        _check_spaces(model, environment)
        return _play(model, environment, wanted, delayed=delayed)
    finally:
        environment.close()


def _play(
    model: DecisionTransformer, environment: VectorEnvironment, wanted: WantedReturn, *, delayed: bool
) -> NDArray[np.float64]:
    rows = environment.rows
    device = model.device
    observations = environment.reset(row_seeds(EVALUATION_SEED, rows))
    decoder = EpisodeDecoder(model, rows)
    totals = np.zeros(rows)
    running = np.ones(rows, bool)
    previous = None
    for _ in range(MAX_STEPS):
        remaining = wanted - (0.0 if delayed else totals)
        returns = torch.as_tensor(np.broadcast_to(remaining, rows).copy(), dtype=torch.float32, device=device)
        logits = decoder.step(returns, torch.as_tensor(observations, dtype=torch.float32, device=device), previous)
        if model.has_bounded_actions:
            previous = logits
        else:
            previous = logits.argmax(-1)
        step = environment.step(previous.cpu().numpy())
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
