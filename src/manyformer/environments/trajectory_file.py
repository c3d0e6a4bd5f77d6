"""Recorded episodes as arrays, and the NumPy archive that holds them."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyformer.files.atomic_files import atomic_write, report_disk_full
from manyformer.spaces import ActionSpace, BoxActions
from manyformer.type_aliases import IntArray

FORMAT = "manyformer-trajectories-1"


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
        np.savez_compressed(file, allow_pickle=False, **arrays)
