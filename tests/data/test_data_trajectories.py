"""Recorded episodes: read from archives, checked, filtered, split, and cut into windows."""

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyformer.base.environments import Trajectories, write_trajectories
from manyformer.base.errors import UserError
from manyformer.base.spaces import BoxActions, DiscreteActions
from manyformer.config import TrajectoriesData
from manyformer.data import open_data
from manyformer.data.pipeline.opened import OpenedData
from manyformer.data.trajectories.episode_archives import RecordedEpisodes, read_archive, read_minari
from manyformer.data.trajectories.open_trajectories import (
    TrajectoryWindows,
    best_episodes,
    delayed_rewards,
    returns_to_go,
    split_episodes,
)
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.batches.episode_batches import TrajectoryBatch

LENGTHS = np.array([3, 2, 5, 1])
REWARDS = np.array([1.0, 2.0, 3.0, -1.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0], dtype=np.float32)
STEPS = len(REWARDS)


def arrays(**changes: Any) -> dict[str, Any]:
    """Four episodes of discrete actions, whose observations are the number of the step, with `changes`."""
    content = {
        "observations": np.stack([np.arange(STEPS), np.full(STEPS, 7.0)], 1).astype(np.float32),
        "actions": np.arange(STEPS) % 3,
        "rewards": REWARDS,
        "lengths": LENGTHS,
    }
    return {name: array for name, array in (content | changes).items() if array is not None}


def episodes(**changes: Any) -> RecordedEpisodes:
    content = arrays(**changes)
    return RecordedEpisodes(*(content[name] for name in ("observations", "actions", "rewards", "lengths")))


def write(folder: Path, **changes: Any) -> Path:
    path = folder / "episodes.npz"
    np.savez(path, **arrays(**changes))
    return path


def opened(folder: Path, **settings: Any) -> OpenedData:
    data = TrajectoriesData.model_validate(
        {"path": str(folder / "episodes.npz"), "length": 2, "valid": 0.25} | settings
    )
    return open_data(data, "windows", batch_tokens=8, cache=folder / "data", seed=0)


def test_returns_to_go_reach_the_true_end_and_include_the_present_reward() -> None:
    assert returns_to_go(episodes()).tolist() == [6, 5, 3, -1, 0, 5, 4, 3, 2, 1, 9]


def test_a_delayed_reward_is_the_return_at_the_last_step() -> None:
    delayed = delayed_rewards(episodes())
    assert delayed.rewards.tolist() == [0, 0, 6, 0, -1, 0, 0, 0, 0, 5, 9]
    assert returns_to_go(delayed).tolist() == [6, 6, 6, -1, -1, 5, 5, 5, 5, 5, 9]


@pytest.mark.parametrize(
    ("fraction", "lengths"),
    # returns are 6, -1, 5, 9: the best episode has 1 step, the next 3, then 5
    [(0.01, [1]), (0.2, [1]), (4 / 11, [3, 1]), (8.9 / 11, [3, 1]), (9 / 11, [3, 5, 1]), (1.0, [3, 2, 5, 1])],
)
def test_the_best_episodes_fill_a_share_of_the_steps(fraction: float, lengths: list[int]) -> None:
    assert best_episodes(episodes(), fraction).lengths.tolist() == lengths


def test_a_window_at_the_end_of_an_episode_is_padded_on_the_left() -> None:
    batch = TrajectoryWindows(episodes(), 4).batch(np.array([1, 5, 10]))
    assert batch.segments.tolist() == [[-1, -1, 0, 0], [0, 0, 0, 0], [-1, -1, -1, 0]]
    assert batch.returns[0, 2:].tolist() == [5, 3]
    assert batch.returns[1].tolist() == [5, 4, 3, 2]
    assert batch.timesteps[0, 2:].tolist() == [1, 2]
    assert batch.targets.tolist()[0] == [IGNORE_INDEX, IGNORE_INDEX, 1, 2]
    assert batch.observations[2, 3, 0] == 10
    assert batch.target_count() == batch.token_count() == 7


def test_continuous_targets_of_padding_are_nan() -> None:
    vectors = np.arange(2 * STEPS, dtype=np.float32).reshape(STEPS, 2)
    batch = TrajectoryWindows(episodes(actions=vectors), 2).batch(np.array([2]))
    assert batch.targets[0, 1].tolist() == [4, 5]
    assert batch.targets[0, 0].isnan().all()
    assert batch.actions.isfinite().all()


def test_held_out_windows_hold_every_step_once(tmp_path: Path) -> None:
    write(tmp_path)
    data = opened(tmp_path)
    observed = torch.cat(
        [batch.observations[batch.segments == 0] for batch in data.valid if isinstance(batch, TrajectoryBatch)]
    )
    splits = split_episodes(read_archive(tmp_path / "episodes.npz"), 0.25)
    assert sorted(observed[:, 0].tolist()) == sorted(splits["valid"].observations[:, 0].tolist())
    assert len(splits["valid"].lengths) == 1
    assert len(splits["train"].lengths) == 3


def test_episodes_are_held_out_once_each() -> None:
    for valid in (0.1, 0.5, 0.9):
        splits = split_episodes(episodes(), valid)
        lengths = [length for split in splits.values() for length in split.lengths.tolist()]
        assert sorted(lengths) == sorted(LENGTHS.tolist())
        assert len(splits["valid"].lengths) == max(1, round(valid * 4))


def test_training_windows_begin_at_every_step_alike(tmp_path: Path) -> None:
    write(tmp_path)
    feed = opened(tmp_path).train
    firsts = [0] * STEPS
    for _ in range(400):
        batch = next(feed)
        assert isinstance(batch, TrajectoryBatch)
        for row, segment in zip(batch.observations[..., 0].long().tolist(), batch.segments.tolist()):
            firsts[row[segment.index(0)]] += 1
    counts = [count for count in firsts if count]
    trained = sum(split_episodes(read_archive(tmp_path / "episodes.npz"), 0.25)["train"].lengths)
    assert len(counts) == trained
    assert 0.7 * 1600 / trained < min(counts) < max(counts) < 1.3 * 1600 / trained


def test_the_data_decides_the_sizes_of_the_model(tmp_path: Path) -> None:
    write(tmp_path)
    data = opened(tmp_path)
    keywords = dict(data.required_keywords)
    train = split_episodes(read_archive(tmp_path / "episodes.npz"), 0.25)["train"].observations
    assert keywords.pop("observation_mean") == pytest.approx(train.mean(0))
    assert keywords.pop("observation_std") == pytest.approx([train[:, 0].std(), 1e-6], rel=1e-3)
    assert keywords == {"observations": 2, "actions": 3, "continuous": False, "window": 2}
    assert data.offered_keywords == {"max_episode_length": 5}
    assert opened(tmp_path, actions=4).required_keywords["actions"] == 4


def test_continuous_actions_have_the_recorded_box_or_that_of_the_data(tmp_path: Path) -> None:
    vectors = np.linspace(-1, 1, STEPS, dtype=np.float32)[:, None]
    write(tmp_path, actions=vectors)
    keywords = opened(tmp_path).required_keywords
    assert (keywords["continuous"], keywords["action_low"], keywords["action_high"]) == (True, [-1.0], [1.0])
    write(tmp_path, actions=vectors, action_low=np.array([-2.0]), action_high=np.array([3.0]))
    keywords = opened(tmp_path).required_keywords
    assert (keywords["action_low"], keywords["action_high"]) == ([-2.0], [3.0])
    with pytest.raises(UserError, match=r"data.actions is 3, but the recorded actions are continuous"):
        opened(tmp_path, actions=3)


def test_episodes_are_found_by_their_ends_where_lengths_are_not_recorded(tmp_path: Path) -> None:
    ends = np.zeros(STEPS, dtype=bool)
    ends[[2, 4, 9]] = True
    path = write(tmp_path, lengths=None, terminations=ends, truncations=np.zeros(STEPS, dtype=bool))
    assert read_archive(path).lengths.tolist() == [3, 2, 5, 1]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"rewards": None}, "there is no array rewards in it; .*without rewards there are no returns"),
    ({"actions": None}, "there is no array actions"),
    ({"lengths": None}, "there is no array lengths in it, nor terminations for each of 11 steps"),
    (
        {"actions": np.arange(STEPS - 1)},
        r"actions must be whole numbers of shape \(11\), and is int64 of shape \(10,\)",
    ),
    ({"rewards": np.where(np.arange(STEPS) == 4, np.nan, REWARDS)}, "rewards of step 1 of episode 1 are no finite"),
    ({"observations": np.full((STEPS, 2), np.inf)}, "observations of step 0 of episode 0 are no finite"),
    (
        {"observations": np.zeros((STEPS, 2, 2))},
        r"observations must be numbers of shape \(11, any\), and is float64 of shape \(11, 2, 2\)",
    ),
    ({"observations": np.full((STEPS, 1), "x")}, r"observations must be numbers of shape \(11, any\), and is <U1"),
    ({"actions": np.array(["left"] * STEPS)}, "actions must be a whole number for each step, or a vector"),
    ({"actions": np.where(np.arange(STEPS) == 6, -1, 0)}, "action of step 1 of episode 2 is -1, and actions are 0 to"),
    ({"actions": np.full(STEPS, 1 << 40)}, "action of step 0 of episode 0 is 1099511627776"),
    ({"lengths": np.array([3, 0, 7, 1])}, "episode 1 has a length of 0"),
    ({"lengths": np.zeros(0, np.int64)}, "sum to 0, and it has 11 steps; steps are left over"),
    ({"lengths": np.array([3, 2, 5])}, "sum to 10, and it has 11 steps; steps are left over"),
    ({"lengths": np.array([3, 2, 5, 9])}, "sum to 19, and it has 11 steps; episode 3 ends after step 19"),
    ({"lengths": np.array([2**62, 2**62, 2**62])}, "sum to 13,835,058,055,282,163,712, and it has 11 steps"),
    ({"returns": np.array([6.0, -1.0, 5.5, 9.0])}, "return of episode 2 is 5.5, and its rewards sum to 5"),
    ({"returns": np.array([6.0, np.nan, 5.0, 9.0])}, "return of episode 1 is nan"),
    ({"terminations": np.arange(STEPS) == 1}, "terminations is true at step 1 of episode 0, which is not the last"),
    ({"truncations": np.arange(STEPS)}, "truncations must be true or false for each step"),
    ({"action_low": np.zeros(1)}, "action_low is for actions that are vectors, and these are whole numbers"),
]


@pytest.mark.parametrize(("changes", "sentence"), BAD)
def test_what_is_wrong_with_a_recording_is_said_in_a_sentence(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(UserError, match=sentence) as caught:
        read_archive(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_actions_outside_their_box_are_named(tmp_path: Path) -> None:
    box = {"action_low": np.array([-1.0]), "action_high": np.array([1.0])}
    path = write(tmp_path, actions=np.linspace(0, 2, STEPS, dtype=np.float32)[:, None], **box)
    with pytest.raises(UserError, match=r"action of step 1 of episode 2 is \[1.2\], and actions are \[-1.\] to \[1.\]"):
        read_archive(path)


def test_arrays_that_need_pickle_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path, actions=np.array([{}] * STEPS, dtype=object))
    with pytest.raises(UserError, match=r"the array actions cannot be read .*are pickles"):
        read_archive(path)


def test_too_few_episodes_and_too_small_batches_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(UserError, match=r"two episodes at least.*data.top \(0.1\) leaves too few"):
        opened(tmp_path, top=0.1)
    with pytest.raises(UserError, match=r"the action 2 occurs, but data.actions is 2"):
        opened(tmp_path, actions=2)
    with pytest.raises(UserError, match=r"batch.tokens is 8, less than one row of 9"):
        opened(tmp_path, length=9)


def test_several_recordings_are_one_data_set(tmp_path: Path) -> None:
    first, second = write(tmp_path), tmp_path / "second.npz"
    np.savez(second, **arrays(observations=np.ones((STEPS, 2))))
    lines = opened(tmp_path, path=[str(first), str(second)]).describe()
    assert lines[0].endswith("8 episodes, 22 time steps")
    np.savez(second, **arrays(observations=np.ones((STEPS, 3))))
    with pytest.raises(UserError, match=r"second.npz: its observations or actions have another form"):
        opened(tmp_path, path=[str(first), str(second)])


@pytest.mark.parametrize("continuous", [False, True])
def test_what_an_environment_writes_is_read(tmp_path: Path, continuous: bool) -> None:
    ends = np.zeros(STEPS, dtype=bool)
    ends[[2, 4, 9, 10]] = True
    content = arrays(actions=np.full((STEPS, 1), 0.5, np.float32)) if continuous else arrays()
    sources = np.array(["a run"] * len(LENGTHS))
    space: Any = BoxActions(1, (-2.0,), (2.0,)) if continuous else DiscreteActions(3)
    finals = np.zeros((len(LENGTHS), 2), np.float32)
    recorded = Trajectories(
        **content, terminations=ends, truncations=~ends & False, source=sources, final_observations=finals
    )
    write_trajectories(tmp_path / "episodes.npz", recorded, environment="CartPole-v1", actions=space)
    read = read_archive(tmp_path / "episodes.npz")
    assert all(np.array_equal(array, content[name]) for name, array in read._asdict().items() if name in content)
    assert (read.action_low is not None) is continuous
    assert opened(tmp_path).required_keywords["continuous"] is continuous


def minari_data_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A local data set of two episodes of three and two steps."""
    minari = pytest.importorskip("minari")
    pytest.importorskip("h5py")
    from gymnasium.spaces import Box, Discrete
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    buffers = []
    for number, length in enumerate((3, 2)):
        buffers.append(
            EpisodeBuffer(
                id=number,
                observations=np.arange(2 * length + 2, dtype=np.float32).reshape(length + 1, 2),
                actions=np.arange(length) % 2,
                rewards=[float(step) for step in range(length)],
                terminations=[False] * (length - 1) + [True],
                truncations=[False] * length,
                infos=None,
            )
        )
    spaces = {"observation_space": Box(-100, 100, (2,)), "action_space": Discrete(2)}
    return minari.create_dataset_from_buffers("local/tiny-v0", buffers, **spaces)


@pytest.mark.filterwarnings("ignore")
def test_local_data_sets_of_minari_are_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari_data_set(tmp_path, monkeypatch)
    read = read_minari("minari:local/tiny-v0")
    assert read.lengths.tolist() == [3, 2]
    assert read.rewards.tolist() == [0, 1, 2, 0, 1]
    assert read.observations[:, 0].tolist() == [0, 2, 4, 0, 2]
    with pytest.raises(UserError, match=r"no local Minari data set of that name; did you mean local/tiny-v0"):
        read_minari("minari:local/tinny-v0")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"environment": "stich-maze"}, "there is no environment 'stich-maze'; did you mean stitch-maze"),
        ({"environment": "stitch-maze"}, "stitch-maze, whose observations are of another shape, unlike those of the"),
        (
            {"environment": "repeat-previous", "actions": 3},
            "whose actions number 4, unlike .*; set data.actions to that",
        ),
    ],
)
def test_an_environment_that_does_not_fit_is_refused_before_training(
    settings: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    write(tmp_path, observations=np.ones((STEPS, 4)))
    with pytest.raises(UserError, match=sentence):
        opened(tmp_path, wanted=1.0, **settings)
    opened(tmp_path, wanted=1.0, environment="repeat-previous", actions=4)


@pytest.mark.parametrize("large", [1e8, 1e16, 1e30])
def test_returns_to_go_do_not_depend_on_other_episodes(large: float) -> None:
    """Sums over all episodes, subtracted, lose the digits that the rewards of an earlier episode take."""
    rewards = np.array([large] * 3 + [0.5, 0.25, 0.125, 2.0**-20, 1.5, -large], dtype=np.float32)
    lengths = np.array([3, 3, 3])
    recorded = RecordedEpisodes(np.zeros((9, 1), np.float32), np.zeros(9, np.int64), rewards, lengths)
    expected = []
    for episode in np.split(rewards, 3):
        exact = [sum(map(Fraction, episode[step:].tolist()), Fraction()) for step in range(3)]
        expected += [float(total) for total in exact]
    np.testing.assert_allclose(returns_to_go(recorded), np.array(expected, dtype=np.float32), rtol=1e-6)
    assert returns_to_go(recorded)[3:6].tolist() == [0.875, 0.375, 0.125]


def test_arrays_of_a_recording_that_are_not_read_are_told(tmp_path: Path) -> None:
    lines: list[str] = []
    read_archive(write(tmp_path, retruns=np.zeros(4)), lines.append)
    assert len(lines) == 1
    assert "not read: retruns" in lines[0]


def test_numbers_beyond_32_bits_are_refused_by_place(tmp_path: Path) -> None:
    """They would become infinite."""
    rewards = REWARDS.astype(np.float64)
    rewards[4] = 1e39
    with pytest.raises(UserError, match="the rewards of step 1 of episode 1 are no finite numbers"):
        read_archive(write(tmp_path, rewards=rewards))
