"""Opening recorded episodes: read and checked once, then split, filtered and read as windows of time steps."""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray

from manyformer.base.environments import make_environment
from manyformer.base.errors import UserError
from manyformer.base.spaces import BoxActions, VectorSpace
from manyformer.config import TrajectoriesData
from manyformer.data.batching.epochs import FIXED_SEED, Epoch, EpochPlan, random_generator
from manyformer.data.pipeline.array_pipeline import ArrayPipeline
from manyformer.data.pipeline.data_paths import GENERATED_PREFIX, MINARI_PREFIX
from manyformer.data.pipeline.kind import register
from manyformer.data.pipeline.opened import LengthLimit, OpenedData, check_holds_row
from manyformer.data.pipeline.splits import path_list
from manyformer.data.pipeline.summary import EXAMPLES, DataSummary, LengthSummary
from manyformer.data.text.text_files import existing_path, file_stamp
from manyformer.data.trajectories.episode_archives import RecordedEpisodes, generate_episodes, read_archive, read_minari
from manyformer.nn.batches import IGNORE_INDEX
from manyformer.nn.batches.episode_batches import TrajectoryBatch
from manyformer.nn.runtime.exact_shares import round_share

MIN_DEVIATION = 1e-6
"""Added to the standard deviation of each observed number, as in the released code: one may be constant."""


def best_episodes(episodes: RecordedEpisodes, fraction: float) -> RecordedEpisodes:
    """The episodes with the highest returns, as many as hold at most this fraction of all steps, at least one.

    The rule of the released code of Chen et al. 2021, section 5.2 (percentile cloning): from the best episode down,
    until the next one would exceed the steps."""
    # stable, so that equal returns are always in the same order
    order = np.argsort(episodes.returns(), kind="stable")[::-1]
    budget = fraction * len(episodes.rewards)
    count = int((np.cumsum(episodes.lengths[order]) <= budget).sum())
    # sorted: chosen episodes stay in the order in which they were recorded
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
        # for each step where its episode begins and ends, so that batches need no search
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
            # no vector of numbers could stand for "no target"
            targets = actions.masked_fill(is_padding[..., None], float("nan"))
        else:
            targets = actions.masked_fill(is_padding, IGNORE_INDEX)
        return TrajectoryBatch(
            returns=torch.from_numpy(self._returns[steps]),
            observations=torch.from_numpy(self._observations[steps]),
            actions=actions,
            targets=targets,
            timesteps=torch.from_numpy(steps - self._starts[steps]),
            segments=segments,
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


class TrajectoriesPipeline(ArrayPipeline[TrajectoriesData, RecordedEpisodes, RecordedEpisodes]):
    """Recorded episodes as windows of time steps; a split is the episodes that are in it."""

    section = TrajectoriesData
    forms = ("windows",)
    read_archive = staticmethod(read_archive)
    nouns = "episodes"
    without_test = "; score the split valid, or another file"

    def stamps(self) -> list[list[str | int]]:
        """A local data set of Minari is never changed."""
        stamps: list[list[str | int]] = []
        for path in path_list(self.data.path):
            if path.startswith(GENERATED_PREFIX):
                stamps.append([path, self.data.generated])
            else:
                stamps.append([path] if path.startswith(MINARI_PREFIX) else file_stamp(existing_path(path)))
        return stamps

    def read_sources(self) -> RecordedEpisodes:
        """The episodes of all paths together. Raises UserError if they do not fit together."""
        recorded = {path: self._read_path(path) for path in path_list(self.data.path)}
        first_path, first = next(iter(recorded.items()))
        for path, episodes in recorded.items():
            if episodes.observations.shape[1] != first.observations.shape[1] or not _same_form(episodes, first):
                raise UserError(f"{path}: its observations or actions have another form than those of {first_path}")
        return reduce(_join, recorded.values())

    def open(self) -> OpenedData:
        check_holds_row(self.data.length, self.request.batch_tokens)
        return super().open()

    def splits(self) -> dict[str, RecordedEpisodes]:
        """The best episodes, with rewards as they are set, split. Raises UserError if there are too few."""
        data = self.data
        splits = split_episodes(self._with_rewards(best_episodes(self.arrays, data.top)), data.valid)
        if len(splits) < 2:
            raise UserError(
                f"{self.path}: there must be two episodes at least, to train on and to hold out"
                + (f"; data.top ({data.top}) leaves too few" if data.top < 1 else "")
            )
        return splits

    def split_of_file(self) -> RecordedEpisodes:
        return self._with_rewards(self.arrays)

    def plan(self, train: RecordedEpisodes, fingerprint: str) -> WindowPlan:
        data = self.data
        settings = f"{fingerprint}-{data.valid}-{data.top}-{data.reward}"
        return WindowPlan(TrajectoryWindows(train, data.length), self.request.batch_tokens // data.length, settings)

    def fixed_epoch(self, split: RecordedEpisodes) -> EveryStep:
        windows = TrajectoryWindows(split, self.data.length)
        return EveryStep(windows, max(1, self.request.batch_tokens // self.data.length))

    def length_limits(self) -> tuple[LengthLimit, ...]:
        return (LengthLimit(self.data.length, "a window (data.length)", "set data.length to that or less"),)

    def required_keywords(self, train: RecordedEpisodes) -> dict[str, Any]:
        """The keywords that the data decides: statistics are those of the training steps. Raises UserError."""
        data = self.data
        recorded = self.arrays
        # sums of many 32-bit numbers would lose digits
        observations = train.observations.astype(np.float64)
        continuous = recorded.actions.ndim == 2
        keywords = {
            "observations": observations.shape[1],
            "actions": recorded.actions.shape[1] if continuous else self._action_count(),
            "continuous": continuous,
            "window": data.length,
            "observation_mean": _numbers(observations.mean(0)),
            "observation_std": _numbers(observations.std(0) + MIN_DEVIATION),
        }
        # found before training: the model could not be played in it afterwards
        if data.environment is not None:
            _check_environment(data.environment, keywords)
        if not continuous:
            return keywords
        if data.actions is not None:
            raise UserError(f"data.actions is {data.actions}, but the recorded actions are continuous; leave it out")
        low = recorded.action_low
        high = recorded.action_high
        if low is None or high is None:
            # without recorded bounds the box is what occurs
            low = recorded.actions.min(0)
            high = recorded.actions.max(0)
            is_constant = low == high
            # a component that never varies needs a box, too
            low = np.where(is_constant, low - 1, low)
            high = np.where(is_constant, high + 1, high)
        return keywords | {"action_low": _numbers(low), "action_high": _numbers(high)}

    def offered_keywords(self) -> dict[str, int | None]:
        return {"max_episode_length": int(self.arrays.lengths.max())}

    def describe(self, splits: Mapping[str, RecordedEpisodes]) -> Iterator[str]:
        data = self.data
        recorded = self.arrays
        returns = recorded.returns()
        yield f"trajectories: {self.path}; {len(returns):,} episodes, {len(recorded.rewards):,} time steps"
        yield f"returns: {returns.min():g} to {returns.max():g}, mean {returns.mean():g}"
        if data.top < 1:
            best = np.concatenate([split.returns() for split in splits.values()])
            yield (
                f"the best {data.top:.0%} of the steps: {len(best):,} episodes, returns {best.min():g} to "
                f"{best.max():g}"
            )
        if data.reward == "last-step":
            yield "rewards: the return of an episode at its last step"
        parts = (f"{name}: {len(split.lengths):,} episodes" for name, split in splits.items())
        yield f"windows of {data.length} time steps; {', '.join(parts)}"

    def summarize(self, splits: Mapping[str, RecordedEpisodes]) -> DataSummary:
        train = splits["train"]
        steps_and_returns = zip(train.lengths[:EXAMPLES].tolist(), train.returns()[:EXAMPLES].tolist())
        return DataSummary(
            noun="episode",
            counts={name: len(split.lengths) for name, split in splits.items()},
            lengths=LengthSummary.of(train.lengths, "time steps", title="episodes"),
            examples=tuple((f"{steps:,} time steps", f"return {total:g}") for steps, total in steps_and_returns),
        )

    def _read_path(self, path: str) -> RecordedEpisodes:
        if path.startswith(GENERATED_PREFIX):
            return generate_episodes(path, self.data.generated)
        if path.startswith(MINARI_PREFIX):
            return read_minari(path)
        return self.read_archive(existing_path(path), self.request.log)

    def _with_rewards(self, episodes: RecordedEpisodes) -> RecordedEpisodes:
        if self.data.reward == "last-step":
            return delayed_rewards(episodes)
        return episodes

    def _action_count(self) -> int:
        largest = int(self.arrays.actions.max())
        actions = self.data.actions
        if actions is not None and largest >= actions:
            raise UserError(f"{self.path}: the action {largest} occurs, but data.actions is {actions}")
        return actions or largest + 1


def _same_form(episodes: RecordedEpisodes, reference: RecordedEpisodes) -> bool:
    """Whether the actions of both are discrete, or vectors of as many numbers."""
    return (
        episodes.actions.dtype == reference.actions.dtype and episodes.actions.shape[1:] == reference.actions.shape[1:]
    )


def _join(episodes: RecordedEpisodes, following: RecordedEpisodes) -> RecordedEpisodes:
    """Two recordings one after the other; bounds are those of both together, unknown if those of either are."""
    low = episodes.action_low
    other_low = following.action_low
    high = episodes.action_high
    other_high = following.action_high
    return RecordedEpisodes(
        observations=np.concatenate([episodes.observations, following.observations]),
        actions=np.concatenate([episodes.actions, following.actions]),
        rewards=np.concatenate([episodes.rewards, following.rewards]),
        lengths=np.concatenate([episodes.lengths, following.lengths]),
        action_low=None if low is None or other_low is None else np.minimum(low, other_low),
        action_high=None if high is None or other_high is None else np.maximum(high, other_high),
    )


def _check_environment(name: str, keywords: Mapping[str, Any]) -> None:
    """Raise UserError, before anything is trained, for an environment that the model could not be played in."""
    environment = make_environment(name, 1)
    # made only to ask for its spaces
    environment.close()
    space = environment.actions
    continuous = isinstance(environment.actions, BoxActions)
    problems = (
        (environment.observations != VectorSpace(keywords["observations"]), "observations are of another shape"),
        (continuous != keywords["continuous"], f"actions are {'continuous' if continuous else 'discrete'}"),
        (space.size != keywords["actions"], f"actions number {space.size}"),
    )
    for is_problem, reason in problems:
        if is_problem:
            remedy = ""
            if space.size > keywords["actions"] and not continuous:
                remedy = "; set data.actions to that"
            raise UserError(
                f"data.environment is {name}, whose {reason}, unlike those of the recorded episodes{remedy}"
            )


def _numbers(array: NDArray[Any]) -> list[float]:
    return [float(number) for number in array]


TRAJECTORIES_KIND = register(TrajectoriesPipeline.data_kind())
