"""Opening recorded episodes: read and checked once, then split, filtered and read as windows."""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyformer.config import TrajectoriesData
from manyformer.data.cache_folder import RECORD_FILE, PreparationResult, load_or_prepare, read_record
from manyformer.data.epochs import HeldOutBatches
from manyformer.data.generated_episodes import GENERATED_PREFIX, generate_episodes
from manyformer.data.kind import DataKind, OpenRequest, register
from manyformer.data.minari_episodes import MINARI_PREFIX, read_minari
from manyformer.data.no_tokenizer import NoTokenizer
from manyformer.data.opened import EvaluationData, EvaluationPath, LengthLimit, OpenedData, check_holds_row, path_name
from manyformer.data.sampler import Sampler
from manyformer.data.saved_tokenizers import TokenizerPair
from manyformer.data.splits import PathOrPaths, path_list
from manyformer.data.summary import EXAMPLES, DataSummary, LengthSummary
from manyformer.data.text_files import existing_path, file_stamp
from manyformer.data.trajectory_archive import RecordedEpisodes, read_archive
from manyformer.data.trajectory_windows import (
    EveryStep,
    TrajectoryWindows,
    WindowPlan,
    best_episodes,
    delayed_rewards,
    split_episodes,
)
from manyformer.environments import make_environment
from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write
from manyformer.files.json_records import DamagedFile
from manyformer.files.verified_folder import VerifiedFolder
from manyformer.spaces import BoxActions, VectorSpace
from manyformer.type_aliases import LogFn

EPISODES_FILE = "episodes.npz"
MIN_DEVIATION = 1e-6
"""Added to the standard deviation of each observed number, as in the released code: one may be constant."""


def open_trajectories(data: TrajectoriesData, form: str, request: OpenRequest) -> OpenedData:
    """Open recorded episodes for training; prepared files are reused if the sources have not changed."""
    check_holds_row(data.length, request.batch_tokens)
    recorded, fingerprint = _load_or_prepare(data, request)
    splits = _split(recorded, data)
    rows = request.batch_tokens // data.length
    settings = f"{fingerprint}-{data.valid}-{data.top}-{data.reward}"
    train = TrajectoryWindows(splits["train"], data.length)
    return OpenedData(
        tokenizers=_no_tokenizers(),
        train=Sampler(WindowPlan(train, rows, settings), request.seed),
        valid=_held_out_batches(splits["valid"], data, request),
        test=None,
        summary_lines=tuple(_summary_lines(data, recorded, splits)),
        summary=_summarize(splits),
        length_limits=(LengthLimit(data.length, "a window (data.length)", "set data.length to that or less"),),
        cache=request.cache,
        required_keywords=_model_keywords(splits["train"], recorded, data),
        offered_keywords={"max_episode_length": int(recorded.lengths.max())},
    )


def held_out_trajectories(data: TrajectoriesData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The held-out episodes of a run, every time step once."""
    if split == "test":
        raise UserError(f"the run in {request.cache.parent} has no test data; score the split valid, or another file")
    if read_record(request.cache) is None:
        open_trajectories(data, form, request)
    episodes = _split(_read_prepared(request.cache), data)["valid"]
    return EvaluationData("valid", _held_out_batches(episodes, data, request))


def trajectories_of_file(
    data: TrajectoriesData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """All episodes of other files, for a trained model."""
    episodes = _with_rewards(_read_paths(path, data, request.log), data)
    return EvaluationData(path_name(path), _held_out_batches(episodes, data, request))


def _load_or_prepare(data: TrajectoriesData, request: OpenRequest) -> tuple[RecordedEpisodes, str]:
    """All episodes, from the prepared file if there is one of the same sources, and a hash of them."""

    def prepare(folder: Path) -> PreparationResult:
        episodes = _read_paths(data.path, data, request.log)
        _write_episodes(folder / EPISODES_FILE, episodes)
        digest = _hash_episodes(episodes)
        previous = read_record(request.cache) if request.belongs_to_model else None
        if previous is not None and previous.sources.get(EPISODES_FILE) != digest:
            raise UserError(
                f"{path_name(data.path)}: these episodes are others than those that this run was trained on; restore "
                "the previous data, or start a new run"
            )
        return PreparationResult(_no_tokenizers(), {}, {EPISODES_FILE: digest}, {})

    stamps = [_stamp(path, data) for path in path_list(data.path)]
    settings = {"kind": data.kind, "stamps": stamps}
    load_or_prepare(request.cache, settings, prepare, belongs_to_model=request.belongs_to_model, log=request.log)
    record = read_record(request.cache)
    assert record is not None
    return _read_prepared(request.cache), record.sources[EPISODES_FILE]


def _stamp(path: str, data: TrajectoriesData) -> list[str | int]:
    """Values that change when what is at the path changes; a local data set of Minari is never changed."""
    if path.startswith(GENERATED_PREFIX):
        return [path, data.generated]
    return [path] if path.startswith(MINARI_PREFIX) else file_stamp(existing_path(path))


def _read_path(path: str, data: TrajectoriesData, log: LogFn) -> RecordedEpisodes:
    if path.startswith(GENERATED_PREFIX):
        return generate_episodes(path, data.generated)
    return read_minari(path) if path.startswith(MINARI_PREFIX) else read_archive(existing_path(path), log)


def _read_paths(paths: PathOrPaths, data: TrajectoriesData, log: LogFn) -> RecordedEpisodes:
    """The episodes of all paths together. Raises UserError if they do not fit together."""
    recorded = {path: _read_path(path, data, log) for path in path_list(paths)}
    first_path, first = next(iter(recorded.items()))
    for path, episodes in recorded.items():
        if episodes.observations.shape[1] != first.observations.shape[1] or not _same_form(episodes, first):
            raise UserError(f"{path}: its observations or actions have another form than those of {first_path}")
    return functools.reduce(_join, recorded.values())


def _same_form(episodes: RecordedEpisodes, others: RecordedEpisodes) -> bool:
    """Whether the actions of both are discrete, or vectors of as many numbers."""
    return episodes.actions.dtype == others.actions.dtype and episodes.actions.shape[1:] == others.actions.shape[1:]


def _join(episodes: RecordedEpisodes, others: RecordedEpisodes) -> RecordedEpisodes:
    """Both one after the other; bounds are those of both together, unknown if those of either are."""
    low, other_low, high, other_high = episodes.action_low, others.action_low, episodes.action_high, others.action_high
    return RecordedEpisodes(
        np.concatenate([episodes.observations, others.observations]),
        np.concatenate([episodes.actions, others.actions]),
        np.concatenate([episodes.rewards, others.rewards]),
        np.concatenate([episodes.lengths, others.lengths]),
        None if low is None or other_low is None else np.minimum(low, other_low),
        None if high is None or other_high is None else np.maximum(high, other_high),
    )


def _hash_episodes(episodes: RecordedEpisodes) -> str:
    """A hash of all arrays; that of their archive would depend on the time at which it was written."""
    digest = hashlib.sha256()
    for name, array in episodes._asdict().items():
        if array is not None:
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _write_episodes(path: Path, episodes: RecordedEpisodes) -> None:
    arrays: Mapping[str, Any] = {name: array for name, array in episodes._asdict().items() if array is not None}
    with atomic_write(path) as file:
        np.savez(file, allow_pickle=False, **arrays)


def _read_prepared(cache: Path) -> RecordedEpisodes:
    """The prepared episodes, whose file is as it was written. Raises DamagedFile."""
    files = VerifiedFolder.open(cache)
    if EPISODES_FILE not in files:
        raise DamagedFile(f"{cache / RECORD_FILE} is damaged: there is no {EPISODES_FILE} beside it")
    return read_archive(files.file(EPISODES_FILE))


def _with_rewards(episodes: RecordedEpisodes, data: TrajectoriesData) -> RecordedEpisodes:
    return delayed_rewards(episodes) if data.reward == "last-step" else episodes


def _split(recorded: RecordedEpisodes, data: TrajectoriesData) -> dict[str, RecordedEpisodes]:
    """The best episodes, with rewards as they are set, split. Raises UserError if there are too few."""
    splits = split_episodes(_with_rewards(best_episodes(recorded, data.top), data), data.valid)
    if len(splits) < 2:
        raise UserError(
            f"{path_name(data.path)}: there must be two episodes at least, to train on and to hold out"
            + (f"; data.top ({data.top}) leaves too few" if data.top < 1 else "")
        )
    return splits


def _held_out_batches(episodes: RecordedEpisodes, data: TrajectoriesData, request: OpenRequest) -> HeldOutBatches:
    windows = TrajectoryWindows(episodes, data.length)
    return HeldOutBatches(EveryStep(windows, max(1, request.batch_tokens // data.length)), None)


def _model_keywords(train: RecordedEpisodes, recorded: RecordedEpisodes, data: TrajectoriesData) -> dict[str, Any]:
    """The keywords that the data decides: statistics are those of the training steps. Raises UserError."""
    observations = train.observations.astype(np.float64)
    continuous = recorded.actions.ndim == 2
    keywords = {
        "observations": observations.shape[1],
        "actions": recorded.actions.shape[1] if continuous else _action_count(recorded.actions, data),
        "continuous": continuous,
        "window": data.length,
        "observation_mean": _numbers(observations.mean(0)),
        "observation_std": _numbers(observations.std(0) + MIN_DEVIATION),
    }
    if data.environment is not None:
        _check_environment(data.environment, keywords)
    if not continuous:
        return keywords
    if data.actions is not None:
        raise UserError(f"data.actions is {data.actions}, but the recorded actions are continuous; leave it out")
    low, high = recorded.action_low, recorded.action_high
    if low is None or high is None:
        low, high = recorded.actions.min(0), recorded.actions.max(0)
        # a component that never varies needs a box, too
        low, high = np.where(low == high, low - 1, low), np.where(low == high, high + 1, high)
    return keywords | {"action_low": _numbers(low), "action_high": _numbers(high)}


def _check_environment(name: str, keywords: Mapping[str, Any]) -> None:
    """Raise UserError, before anything is trained, for an environment that the model could not be played in."""
    environment = make_environment(name, 1)
    environment.close()
    space, continuous = environment.actions, isinstance(environment.actions, BoxActions)
    problems = (
        (environment.observations != VectorSpace(keywords["observations"]), "observations are of another shape"),
        (continuous != keywords["continuous"], f"actions are {'continuous' if continuous else 'discrete'}"),
        (space.size != keywords["actions"], f"actions number {space.size}"),
    )
    for is_problem, reason in problems:
        if is_problem:
            remedy = "; set data.actions to that" if space.size > keywords["actions"] and not continuous else ""
            raise UserError(
                f"data.environment is {name}, whose {reason}, unlike those of the recorded episodes{remedy}"
            )


def _action_count(actions: NDArray[Any], data: TrajectoriesData) -> int:
    largest = int(actions.max())
    if data.actions is not None and largest >= data.actions:
        raise UserError(f"{path_name(data.path)}: the action {largest} occurs, but data.actions is {data.actions}")
    return data.actions or largest + 1


def _numbers(array: NDArray[Any]) -> list[float]:
    return [float(number) for number in array]


def _summary_lines(
    data: TrajectoriesData, recorded: RecordedEpisodes, splits: Mapping[str, RecordedEpisodes]
) -> Iterator[str]:
    returns = recorded.returns()
    yield f"trajectories: {path_name(data.path)}; {len(returns):,} episodes, {len(recorded.rewards):,} time steps"
    yield f"returns: {returns.min():g} to {returns.max():g}, mean {returns.mean():g}"
    if data.top < 1:
        best = np.concatenate([split.returns() for split in splits.values()])
        yield f"the best {data.top:.0%} of the steps: {len(best):,} episodes, returns {best.min():g} to {best.max():g}"
    if data.reward == "last-step":
        yield "rewards: the return of an episode at its last step"
    parts = (f"{name}: {len(split.lengths):,} episodes" for name, split in splits.items())
    yield f"windows of {data.length} time steps; {', '.join(parts)}"


def _summarize(splits: Mapping[str, RecordedEpisodes]) -> DataSummary:
    """What a person can check of the episodes."""
    train = splits["train"]
    steps_and_returns = zip(train.lengths[:EXAMPLES].tolist(), train.returns()[:EXAMPLES].tolist())
    return DataSummary(
        noun="episode",
        counts={name: len(split.lengths) for name, split in splits.items()},
        lengths=LengthSummary.of(train.lengths, "time steps", title="episodes"),
        examples=tuple((f"{steps:,} time steps", f"return {total:g}") for steps, total in steps_and_returns),
    )


def _no_tokenizers() -> TokenizerPair:
    tokenizer = NoTokenizer()
    return TokenizerPair(tokenizer, tokenizer)


TRAJECTORIES_KIND = register(
    DataKind(
        section=TrajectoriesData,
        forms=("windows",),
        open=open_trajectories,
        held_out=held_out_trajectories,
        from_file=trajectories_of_file,
    )
)
