"""Recorded episodes as arrays, and what they are written as: a NumPy archive, or a local data set of Minari."""

import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.base.environments.vector_environment import VectorEnvironment
from manyformer.base.errors import UserError
from manyformer.base.files.atomic_files import atomic_write, report_disk_full
from manyformer.base.spaces import ActionSpace, BoxActions, PixelSpace
from manyformer.base.type_aliases import IntArray

FORMAT = "manyformer-trajectories-1"
NAME_FORM = re.compile(r"([\w-]+/)*[\w-]+-v\d+")
"""What Minari takes as a name: words and folders, and a version."""


class Trajectories(NamedTuple):
    """The steps of whole episodes, one episode after the other.

    `observations` (steps, f) float32 or (steps, h, w, c) uint8 are those before each action; `actions` are (steps,)
    int64, or (steps, a) float32 within the bounds of the environment. `terminations` and `truncations` say how the
    episode of a last step ended. `lengths` are the steps of each episode, `source` says who acted in it, and
    `final_observations` is what was observed after its last action.
    """

    observations: NDArray[Any]
    actions: NDArray[Any]
    rewards: NDArray[np.float32]
    terminations: NDArray[np.bool_]
    truncations: NDArray[np.bool_]
    lengths: IntArray
    source: NDArray[np.str_]
    final_observations: NDArray[Any]

    @property
    def episode_returns(self) -> NDArray[np.float64]:
        """The sum of rewards of each episode."""
        starts = np.cumsum(self.lengths) - self.lengths
        return np.add.reduceat(self.rewards.astype(np.float64), starts)


def write_trajectories(path: Path, trajectories: Trajectories, *, environment: str, actions: ActionSpace) -> None:
    """Write episodes as a NumPy archive, atomically; `environment` is its name, `actions` what can be done in it."""
    facts: dict[str, Any] = {"format": FORMAT, "environment": environment}
    if isinstance(actions, BoxActions):
        facts["action_low"], facts["action_high"] = (np.array(x, np.float32) for x in (actions.low, actions.high))
    arrays: dict[str, Any] = {**trajectories._asdict(), **facts}
    with report_disk_full(f"the trajectories in {path}"), atomic_write(path) as file:
        # without pickles a reader need not trust the file
        np.savez_compressed(file, allow_pickle=False, **arrays)


def check_data_set_name(name: str) -> None:
    """Raise UserError for a name that Minari does not take or has already, and where it is not installed."""
    try:
        import minari
    except ImportError as error:
        raise UserError('a data set of Minari needs one more library: pip install "manyformer[rl]"') from error
    if not NAME_FORM.fullmatch(name):
        raise UserError(f"--minari {name}: the name of a data set ends with its version, such as local/cartpole-v0")
    if name in minari.list_local_datasets():
        raise UserError(f"--minari {name}: this data set exists already; choose another name")


def write_data_set(name: str, trajectories: Trajectories, environment: VectorEnvironment) -> None:
    """Write episodes as the local data set `name`, with the last observation of each. Raises UserError for the name."""
    check_data_set_name(name)
    import minari
    from gymnasium.spaces import Box, Discrete, Space

    space = environment.observations
    actions = environment.actions
    is_image = isinstance(space, PixelSpace)
    low, high = (0, 255) if is_image else (-np.inf, np.inf)
    observation_space = Box(low, high, space.shape, np.uint8 if is_image else np.float32)
    action_space: Space[Any] = Discrete(actions.size)
    if isinstance(actions, BoxActions):
        action_space = Box(np.array(actions.low, np.float32), np.array(actions.high, np.float32), dtype=np.float32)
    with warnings.catch_warnings():
        # authors, links and scores of an expert are not known
        warnings.simplefilter("ignore")
        minari.create_dataset_from_buffers(
            name,
            _episode_buffers(trajectories),
            observation_space=observation_space,
            action_space=action_space,
            description=f"episodes of {environment.name}, recorded by manyformer",
        )


def _episode_buffers(trajectories: Trajectories) -> list[Any]:
    """Each episode as Minari takes it."""
    from minari.data_collector import EpisodeBuffer

    buffers = []
    starts = np.cumsum(trajectories.lengths) - trajectories.lengths
    for number, (start, length) in enumerate(zip(starts, trajectories.lengths, strict=True)):
        part = slice(start, start + length)
        # Minari has one observation more than actions
        observed = np.concatenate([trajectories.observations[part], trajectories.final_observations[number][None]])
        ends = trajectories.terminations[part], trajectories.truncations[part]
        columns = (list(array) for array in (observed, trajectories.actions[part], trajectories.rewards[part], *ends))
        observations, chosen, rewards, terminations, truncations = columns
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=observations,
                actions=chosen,
                rewards=rewards,
                terminations=terminations,
                truncations=truncations,
            )
        )
    return buffers
