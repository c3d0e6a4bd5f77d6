"""Windows of recorded episodes: returns to the end, the best episodes, and batches of windows."""

from typing import final

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.batches import IGNORE_INDEX
from manyformer.batches.episode_batches import TrajectoryBatch
from manyformer.data.epochs import FIXED_SEED, Epoch, EpochPlan, random_generator
from manyformer.data.trajectory_archive import RecordedEpisodes
from manyformer.exact_shares import round_share


def best_episodes(episodes: RecordedEpisodes, fraction: float) -> RecordedEpisodes:
    """The episodes with the highest returns, as many as hold at most this fraction of all steps, at least one.

    The rule of the released code of Chen et al. 2021, section 5.2 (percentile cloning): from the best episode down,
    until the next one would exceed the steps."""
    order = np.argsort(episodes.returns(), kind="stable")[::-1]
    budget = fraction * len(episodes.rewards)
    count = int((np.cumsum(episodes.lengths[order]) <= budget).sum())
    return episodes.select(np.sort(order[: max(1, count)]))


def delayed_rewards(episodes: RecordedEpisodes) -> RecordedEpisodes:
    """The same episodes with their return as the reward of the last step, and 0 before (Chen et al. 2021, 5.5)."""
    rewards = np.zeros_like(episodes.rewards)
    rewards[episodes.starts + episodes.lengths - 1] = episodes.returns()
    return episodes._replace(rewards=rewards)


def returns_to_go(episodes: RecordedEpisodes) -> NDArray[np.float32]:
    """The sum of rewards from each step to the end of its episode, its own included.

    Each episode is summed by itself, from its end: differences of sums over all episodes would lose the digits that the
    rewards of another episode take."""
    sums = episodes.rewards.astype(np.float64)
    for start, length in zip(episodes.starts.tolist(), episodes.lengths.tolist(), strict=True):
        from_end = sums[start : start + length][::-1]
        np.cumsum(from_end, out=from_end)
    return sums.astype(np.float32)


def split_episodes(episodes: RecordedEpisodes, valid: float) -> dict[str, RecordedEpisodes]:
    """The splits "train" and "valid", always the same ones; each has an episode if there are two.

    Episodes are drawn without regard to their content: the same few may have been recorded again and again."""
    order = random_generator(FIXED_SEED).permutation(len(episodes.lengths))
    count = max(1, round_share(valid, len(order)))
    parts = {"train": np.sort(order[count:]), "valid": np.sort(order[:count])}
    return {name: episodes.select(part) for name, part in parts.items() if len(part)}


@final
class TrajectoryWindows:
    """Makes batches of windows of `length` time steps of some episodes."""

    def __init__(self, episodes: RecordedEpisodes, length: int) -> None:
        self.length = length
        self.steps = len(episodes.rewards)
        self._observations = episodes.observations
        self._actions = episodes.actions
        self._returns = returns_to_go(episodes)
        self._starts = np.repeat(episodes.starts, episodes.lengths)
        self._stops = np.repeat(episodes.starts + episodes.lengths, episodes.lengths)

    def every_step(self) -> NDArray[np.int64]:
        """The first steps of windows that hold every step once."""
        offsets = np.arange(self.steps) - self._starts
        return np.flatnonzero(offsets % self.length == 0)

    def batch(self, first_steps: NDArray[np.int64]) -> TrajectoryBatch:
        """The windows that begin at these steps; one that reaches beyond its episode is padded on the left."""
        lengths = np.minimum(self.length, self._stops[first_steps] - first_steps)
        columns = np.arange(self.length) - (self.length - lengths)[:, None]
        is_step = columns >= 0
        steps = first_steps[:, None] + np.maximum(columns, 0)
        # -1 is padding
        segments = torch.from_numpy(is_step.astype(np.int64) - 1)
        actions = torch.from_numpy(self._actions[steps])
        is_padding = torch.from_numpy(~is_step)
        if actions.is_floating_point():
            targets = actions.masked_fill(is_padding[..., None], float("nan"))
        else:
            targets = actions.masked_fill(is_padding, IGNORE_INDEX)
        return TrajectoryBatch(
            torch.from_numpy(self._returns[steps]),
            torch.from_numpy(self._observations[steps]),
            actions,
            targets,
            torch.from_numpy(steps - self._starts[steps]),
            segments,
        )


@final
class WindowPlan(EpochPlan):
    """Windows at random steps: an episode is drawn in proportion to its length, a start in it uniformly.

    Chen et al. 2021, the released code. An epoch has as many windows as would hold all steps once."""

    def __init__(self, windows: TrajectoryWindows, rows: int, fingerprint: str) -> None:
        self._windows = windows
        self._rows = rows
        self.fingerprint = f"{fingerprint}-{windows.length}-{rows}"

    def epoch(self, seed: int, number: int) -> "RandomWindows":
        return RandomWindows(self._windows, self._rows, (seed, number))


@final
class RandomWindows(Epoch):
    """The batches of an epoch, determined by its seeds."""

    def __init__(self, windows: TrajectoryWindows, rows: int, seeds: tuple[int, ...]) -> None:
        self._windows = windows
        self._rows = rows
        self._seeds = seeds

    def __len__(self) -> int:
        return -(-self._windows.steps // (self._rows * self._windows.length))

    def batch(self, number: int) -> TrajectoryBatch:
        random = random_generator(*self._seeds, number)
        # a uniform step of all episodes is in an episode with a probability proportional to its length
        return self._windows.batch(random.integers(self._windows.steps, size=self._rows))


@final
class EveryStep(Epoch):
    """Windows that hold every step once, always in the same order."""

    def __init__(self, windows: TrajectoryWindows, rows: int) -> None:
        self._windows = windows
        self._rows = rows
        self._first_steps = windows.every_step()

    def __len__(self) -> int:
        return -(-len(self._first_steps) // self._rows)

    def batch(self, number: int) -> TrajectoryBatch:
        return self._windows.batch(self._first_steps[number * self._rows : (number + 1) * self._rows])
