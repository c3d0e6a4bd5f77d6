"""Recorded episodes: of NumPy archives, local data sets of Minari, and the behavior of our own environments.

The arrays of the steps of all episodes are compared with each other when they are read."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.environments import OWN_ENVIRONMENTS, GraphTask, make_environment, row_seeds
from manyformer.base.errors import UserError, suggest_names
from manyformer.base.type_aliases import LogFn
from manyformer.data.pipeline.data_paths import GENERATED_PREFIX, MINARI_PREFIX
from manyformer.data.storage.array_archives import (
    array_members,
    check_numbers,
    describe_array,
    read_arrays,
    whole_numbers,
)

STEP_ARRAYS = ("observations", "actions", "rewards")
ENDS = ("terminations", "truncations")
ARRAYS = (*STEP_ARRAYS, *ENDS, "lengths", "returns", "action_low", "action_high")
NOTES = ("format", "environment", "source", "final_observations")
"""Arrays that collected episodes have besides, and that no window holds."""
MAX_DISCRETE_ACTIONS = 1 << 16
"""The largest number of discrete actions: an observation has as many outputs."""
RETURN_TOLERANCE = 1e-3
"""The largest difference, relative to its size, of a recorded return and the sum of its episode's rewards."""
GENERATION_SEED = 20210602
"""Decides the episodes: they are the same ones for all runs."""


class RecordedEpisodes(NamedTuple):
    """The steps of all episodes one after another; actions are whole numbers, or vectors in a box.

    `observations[t]` is what is observed before `actions[t]`, which `rewards[t]` follows. `action_low` and
    `action_high` bound continuous actions, None where unknown."""

    observations: NDArray[np.float32]
    actions: NDArray[np.int64] | NDArray[np.float32]
    rewards: NDArray[np.float32]
    lengths: NDArray[np.int64]
    action_low: NDArray[np.float32] | None = None
    action_high: NDArray[np.float32] | None = None

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays of an archive that is read as these episodes."""
        return {name: array for name, array in self._asdict().items() if array is not None}

    @property
    def starts(self) -> NDArray[np.int64]:
        """The index of the first step of each episode."""
        starts: NDArray[np.int64] = np.cumsum(self.lengths) - self.lengths
        return starts

    def returns(self) -> NDArray[np.float64]:
        """The sum of all rewards of each episode."""
        sums: NDArray[np.float64] = np.add.reduceat(self.rewards.astype(np.float64), self.starts)
        return sums

    def select(self, episodes: NDArray[np.int64]) -> "RecordedEpisodes":
        """These episodes, in this order."""
        # the steps of all chosen episodes, as one index
        steps = np.concatenate([np.arange(self.starts[n], self.starts[n] + self.lengths[n]) for n in episodes])
        return self._replace(
            observations=self.observations[steps],
            actions=self.actions[steps],
            rewards=self.rewards[steps],
            lengths=self.lengths[episodes],
        )


def read_archive(path: Path, log: LogFn | None = None) -> RecordedEpisodes:
    """The episodes in a NumPy archive; a line in the log names arrays that are not read.

    Raises UserError for a defect, with the number of the episode from 0 on."""
    members = array_members(path)
    if missing := [name for name in STEP_ARRAYS if name not in members]:
        remedy = ""
        if missing[0] == "rewards":
            remedy = "; without rewards there are no returns to learn from"
        raise UserError(f"{path}: there is no array {missing[0]} in it; {suggest_names(missing[0], members)}{remedy}")
    return check_episodes(read_arrays(path, ARRAYS, log, ignored=NOTES), str(path))


def read_minari(path: str) -> RecordedEpisodes:
    """The episodes of the local data set `minari:NAME`; nothing is downloaded. Raises UserError for a defect."""
    try:
        import minari
    except ImportError:
        raise UserError(f"{path}: this needs the package minari: pip install 'manyformer[rl]'") from None
    name = path.removeprefix(MINARI_PREFIX)
    # looked up first, so that the message can list the names that there are
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
            # dictionaries of observations become an array of objects
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
    """`count` episodes of the environment `generated:NAME`. Raises UserError for one without a behavior of its own."""
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
        # the behavior of the environment itself, which is what a model is to learn from
        actions = environment.recorded_actions()
        step = environment.step(actions)
        steps.append((observations, actions, step.rewards))
        # rows go on after their episode has ended; the mask leaves out those steps
        masks.append(running)
        observations = step.observations
        running = running & ~step.done
    mask = np.stack(masks, 1)
    observed, acted, rewarded = (np.stack(arrays, 1)[mask] for arrays in zip(*steps))
    return RecordedEpisodes(observed, acted, rewarded, mask.sum(1))


def check_episodes(arrays: Mapping[str, NDArray[Any]], name: str) -> RecordedEpisodes:
    """Episodes from arrays of a recording called `name`, every one compared with the others. Raises UserError."""
    actions = arrays["actions"]
    rewards = arrays["rewards"]
    lengths = _read_lengths(arrays, rewards.size, name)
    episode_of = np.repeat(np.arange(len(lengths)), lengths)
    steps = len(episode_of)

    def place(step: int) -> str:
        return _step_name(step, episode_of, lengths)

    # the type decides: whole numbers are choices, floating point numbers are vectors
    is_vector = actions.ndim == 2 and actions.dtype.kind == "f"
    if not is_vector and not (actions.ndim == 1 and actions.dtype.kind in "iu"):
        raise UserError(
            f"{name}: actions must be a whole number for each step, or a vector of floating point numbers, and is "
            f"{describe_array(actions)}"
        )
    checked_actions: NDArray[np.int64] | NDArray[np.float32]
    if is_vector:
        checked_actions = check_numbers(arrays, "actions", (steps, None), name, place=place)
    else:
        checked_actions = whole_numbers(arrays, "actions", (steps,), name)
    episodes = RecordedEpisodes(
        observations=check_numbers(arrays, "observations", (steps, None), name, place=place),
        actions=checked_actions,
        rewards=check_numbers(arrays, "rewards", (steps,), name, place=place),
        lengths=lengths,
        action_low=_read_bound(arrays, "action_low", checked_actions, name),
        action_high=_read_bound(arrays, "action_high", checked_actions, name),
    )
    _check_actions(episodes, episode_of, name)
    _check_returns(episodes, arrays, name)
    _check_ends(lengths, arrays, name)
    return episodes


def _read_lengths(arrays: Mapping[str, NDArray[Any]], steps: int, name: str) -> NDArray[np.int64]:
    """The lengths of the episodes, from the ends of episodes where they are not recorded."""
    if "lengths" in arrays:
        lengths = whole_numbers(arrays, "lengths", (None,), name)
    else:
        missing = [key for key in ENDS if key not in arrays or arrays[key].shape != (steps,)]
        if missing:
            raise UserError(f"{name}: there is no array lengths in it, nor {missing[0]} for each of {steps:,} steps")
        # an episode ends by itself, or is cut off by a limit of its time
        ends = np.flatnonzero(arrays[ENDS[0]] | arrays[ENDS[1]])
        # steps after the last end are an episode that the recording cut off
        bounds = np.unique(np.append(ends + 1, steps))
        lengths = np.diff(bounds, prepend=0)
    if (lengths < 1).any():
        number = int((lengths < 1).argmax())
        raise UserError(f"{name}: episode {number} has a length of {lengths[number]}; an episode has a step at least")
    # as Python's integers: a sum of absurd lengths must not overflow into a right one
    stops = np.cumsum(lengths.astype(object))
    total = stops[-1] if len(stops) else 0
    if total != steps:
        beyond = np.flatnonzero(stops > steps)
        where = "steps are left over"
        if len(beyond):
            where = f"episode {beyond[0]} ends after step {stops[beyond[0]]:,}"
        raise UserError(f"{name}: the lengths of its episodes sum to {total:,}, and it has {steps:,} steps; {where}")
    return lengths


def _read_bound(
    arrays: Mapping[str, NDArray[Any]], key: str, actions: NDArray[Any], name: str
) -> NDArray[np.float32] | None:
    if key not in arrays:
        return None
    if actions.ndim == 1:
        raise UserError(f"{name}: {key} is for actions that are vectors, and these are whole numbers; leave it out")
    return check_numbers(arrays, key, actions.shape[1:], name, place=lambda i: f"number {i} of an action")


def _check_actions(episodes: RecordedEpisodes, episode_of: NDArray[np.int64], name: str) -> None:
    """Raise UserError for an action that is out of range."""
    actions = episodes.actions
    low = episodes.action_low
    high = episodes.action_high
    invalid: NDArray[np.bool_]
    if actions.ndim == 1:
        invalid = (actions < 0) | (actions >= MAX_DISCRETE_ACTIONS)
        allowed = f"0 to {MAX_DISCRETE_ACTIONS - 1:,}"
    elif low is None or high is None:
        return
    else:
        if not (low < high).all() or not np.isfinite(high - low).all():
            raise UserError(f"{name}: action_low ({low}) must be below action_high ({high}), both finite")
        invalid = np.any((actions < low) | (actions > high), axis=1)
        allowed = f"{low} to {high}"
    if invalid.any():
        step = int(invalid.argmax())
        where = _step_name(step, episode_of, episodes.lengths)
        raise UserError(f"{name}: the action of {where} is {actions[step]}, and actions are {allowed}")


def _check_returns(episodes: RecordedEpisodes, arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    """Raise UserError if recorded returns are others than the sums of the rewards."""
    if "returns" not in arrays:
        return
    recorded = arrays["returns"]
    sums = episodes.returns()
    if recorded.shape != sums.shape or recorded.dtype.kind not in "fiu":
        raise UserError(
            f"{name}: returns must be a number for each of {len(sums):,} episodes: {describe_array(recorded)}"
        )
    # not `>`, which is False for a NaN
    differs = ~(np.abs(recorded - sums) <= RETURN_TOLERANCE * np.maximum(1, np.abs(sums)))
    if differs.any():
        number = int(differs.argmax())
        raise UserError(
            f"{name}: the return of episode {number} is {recorded[number]:g}, and its rewards sum to {sums[number]:g}"
        )


def _check_ends(lengths: NDArray[np.int64], arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    """Raise UserError if an episode ends before its last step."""
    starts = np.cumsum(lengths) - lengths
    is_last = np.zeros(int(lengths.sum()), dtype=bool)
    is_last[starts + lengths - 1] = True
    for key in ENDS:
        if key not in arrays:
            continue
        if arrays[key].shape != is_last.shape or arrays[key].dtype.kind != "b":
            raise UserError(f"{name}: {key} must be true or false for each step, and is {describe_array(arrays[key])}")
        if (early := arrays[key] & ~is_last).any():
            step = int(early.argmax())
            where = _step_name(step, np.repeat(np.arange(len(lengths)), lengths), lengths)
            raise UserError(f"{name}: {key} is true at {where}, which is not the last step of its episode")


def _step_name(step: int, episode_of: NDArray[np.int64], lengths: NDArray[np.int64]) -> str:
    episode = int(episode_of[step])
    return f"step {step - int(lengths[:episode].sum())} of episode {episode}"
