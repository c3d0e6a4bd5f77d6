"""Episodes recorded in one of our own environments by its own behaviour, such as random walks."""

import numpy as np

from manyformer.data.trajectory_archive import RecordedEpisodes
from manyformer.environments import OWN_ENVIRONMENTS, GraphTask, make_environment, row_seeds
from manyformer.errors import UserError, suggest_names

GENERATED_PREFIX = "generated:"
GENERATION_SEED = 20210602
"""Decides the episodes: they are the same ones for all runs."""


def generate_episodes(path: str, count: int) -> RecordedEpisodes:
    """`count` episodes of the environment `generated:NAME`. Raises UserError for one without a behaviour of its own."""
    name = path.removeprefix(GENERATED_PREFIX)
    names = [key for key, kind in OWN_ENVIRONMENTS.items() if issubclass(kind, GraphTask)]
    if name not in names:
        raise UserError(f"{path}: there is no environment of that name with a behaviour; {suggest_names(name, names)}")
    environment = make_environment(name, count)
    assert isinstance(environment, GraphTask)
    observations, running = environment.reset(row_seeds(GENERATION_SEED, count)), np.ones(count, bool)
    steps, masks = [], []
    while running.any():
        actions = environment.recorded_actions()
        step = environment.step(actions)
        steps.append((observations, actions, step.rewards))
        masks.append(running)
        observations, running = step.observations, running & ~step.done
    mask = np.stack(masks, 1)
    observed, acted, rewarded = (np.stack(arrays, 1)[mask] for arrays in zip(*steps))
    return RecordedEpisodes(observed, acted, rewarded, mask.sum(1))
