"""Recorded episodes that are no archive: local data sets of Minari, and those of our own environments' behaviour."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyformer.data.trajectory_archive import STEP_ARRAYS, RecordedEpisodes, check_episodes
from manyformer.environments import OWN_ENVIRONMENTS, GraphTask, make_environment, row_seeds
from manyformer.errors import UserError, suggest_names

MINARI_PREFIX = "minari:"
GENERATED_PREFIX = "generated:"
GENERATION_SEED = 20210602
"""Decides the episodes: they are the same ones for all runs."""


def read_minari(path: str) -> RecordedEpisodes:
    """The episodes of the local data set `minari:NAME`; nothing is downloaded. Raises UserError for a defect."""
    try:
        import minari
    except ImportError:
        raise UserError(f"{path}: this needs the package minari: pip install 'manyformer[rl]'") from None
    name = path.removeprefix(MINARI_PREFIX)
    local_names = list(minari.list_local_datasets())
    if name not in local_names:
        suggestion = "there are none on this machine"
        if local_names:
            suggestion = suggest_names(name, local_names)
        raise UserError(f"{path}: there is no local Minari data set of that name; {suggestion}")
    episodes: list[dict[str, NDArray[Any]]] = []
    try:
        for number, episode in enumerate(minari.load_dataset(name).iterate_episodes()):
            arrays = {key: np.asarray(getattr(episode, key)) for key in STEP_ARRAYS}
            if arrays["observations"].dtype == object:
                raise UserError(f"{path}: the observations of episode {number} must be vectors, not nested ones")
            # Minari also stores what is observed after the last action
            arrays["observations"] = arrays["observations"][: len(arrays["rewards"])]
            episodes.append(arrays)
    except ImportError as error:
        raise UserError(f"{path}: {str(error).strip()}") from error
    except (OSError, ValueError, KeyError, AssertionError) as error:
        raise UserError(f"{path}: this Minari data set cannot be read ({error})") from error
    return check_episodes(_join_episodes(episodes, path), path)


def _join_episodes(episodes: list[dict[str, NDArray[Any]]], path: str) -> dict[str, NDArray[Any]]:
    """The arrays of all episodes end to end, with their lengths. Raises UserError if they do not fit together."""
    if not episodes:
        raise UserError(f"{path}: this Minari data set has no episodes")
    for number, arrays in enumerate(episodes):
        counts = {key: len(array) for key, array in arrays.items()}
        if len(set(counts.values())) > 1:
            raise UserError(f"{path}: episode {number} has {', '.join(f'{n} {key}' for key, n in counts.items())}")
        for key, array in arrays.items():
            if array.shape[1:] != episodes[0][key].shape[1:]:
                raise UserError(f"{path}: the {key} of episode {number} have another shape than those of episode 0")
    joined = {key: np.concatenate([arrays[key] for arrays in episodes]) for key in STEP_ARRAYS}
    return joined | {"lengths": np.array([len(arrays["rewards"]) for arrays in episodes])}


def generate_episodes(path: str, count: int) -> RecordedEpisodes:
    """`count` episodes of the environment `generated:NAME`. Raises UserError for one without a behaviour of its own."""
    name = path.removeprefix(GENERATED_PREFIX)
    names = [key for key, kind in OWN_ENVIRONMENTS.items() if issubclass(kind, GraphTask)]
    if name not in names:
        raise UserError(f"{path}: there is no environment of that name with a behaviour; {suggest_names(name, names)}")
    environment = make_environment(name, count)
    assert isinstance(environment, GraphTask)
    observations = environment.reset(row_seeds(GENERATION_SEED, count))
    running = np.ones(count, bool)
    steps = []
    masks = []
    while running.any():
        actions = environment.recorded_actions()
        step = environment.step(actions)
        steps.append((observations, actions, step.rewards))
        masks.append(running)
        observations = step.observations
        running = running & ~step.done
    mask = np.stack(masks, 1)
    observed, acted, rewarded = (np.stack(arrays, 1)[mask] for arrays in zip(*steps))
    return RecordedEpisodes(observed, acted, rewarded, mask.sum(1))
