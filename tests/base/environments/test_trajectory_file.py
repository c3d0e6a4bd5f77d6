"""The archive of recorded episodes holds what it says, without a pickle."""

from pathlib import Path

import numpy as np

from manyformer.base.environments import Trajectories, write_trajectories
from manyformer.base.spaces import BoxActions


def test_an_archive_holds_plain_arrays(tmp_path: Path) -> None:
    ends = np.array([False, True, False, False, False])
    recorded = Trajectories(
        np.arange(10, dtype=np.float32).reshape(5, 2),
        np.ones((5, 1), np.float32),
        np.arange(5, dtype=np.float32),
        ends,
        np.array([False, False, False, False, True]),
        np.array([2, 3]),
        np.array(["expert", "random"]),
        np.zeros((2, 2), np.float32),
    )
    assert recorded.episode_returns.tolist() == [1, 9]
    file = tmp_path / "episodes.npz"
    write_trajectories(file, recorded, environment="Pendulum-v1", actions=BoxActions(1, (-2.0,), (2.0,)))
    with np.load(file, allow_pickle=False) as archive:
        for name, array in recorded._asdict().items():
            np.testing.assert_array_equal(archive[name], array)
        assert str(archive["format"]) == "manyformer-trajectories-1"
        assert str(archive["environment"]) == "Pendulum-v1"
        assert archive["action_low"].tolist() == [-2]
        assert archive["action_high"].tolist() == [2]
