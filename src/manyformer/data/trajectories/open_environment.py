"""Opening environments: rollouts with the current weights for training, and held-out episodes with fixed seeds."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import nn

from manyformer.base.environments import VectorEnvironment, make_environment, row_seeds
from manyformer.base.errors import UserError
from manyformer.base.files.json_text import json_text
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.base.spaces import BoxActions, PixelSpace
from manyformer.config import EnvironmentData
from manyformer.data.batching.epochs import FIXED_SEED, Epoch, HeldOutBatches, SeededFeed, random_generator
from manyformer.data.pipeline.kind import DataKind, OpenRequest, register
from manyformer.data.pipeline.opened import EvaluationData, EvaluationPath, OpenedData, path_name
from manyformer.data.rollouts import (
    EPISODE_SCORES,
    ROLLOUT_DIAGNOSTICS,
    ActingPolicy,
    EpisodeBatch,
    RolloutCollector,
    RolloutSettings,
    read_collector,
    write_collector,
)
from manyformer.data.tokenizers.saved_tokenizers import TokenizerPair
from manyformer.data.tokenizers.tokenizer import NoTokenizer
from manyformer.nn.batches.episode_batches import ClippedObjective, RolloutBatch
from manyformer.nn.core import tree_map


@final
class RolloutFeed(SeededFeed):
    """Collects a rollout at the beginning of each epoch, and divides its rows anew into batches in each of the passes.

    `batch_rows` is the largest number of rows of a batch. A batch holds whole rows, so that the memory of a policy
    reaches as far as while it acted.
    """

    diagnostics = frozenset(ROLLOUT_DIAGNOSTICS)
    score_names = (*EPISODE_SCORES, *ROLLOUT_DIAGNOSTICS)
    _changed_data = (
        "the environment or its settings differ from those of this run's checkpoint; restore them, or start a new run"
    )

    def __init__(
        self,
        environment: VectorEnvironment,
        settings: RolloutSettings,
        *,
        passes: int,
        batch_rows: int,
        seed: int,
        fingerprint: str,
    ) -> None:
        super().__init__(seed, fingerprint)
        self.environment = environment
        self.settings = settings
        self._passes = passes
        # whole rows, as evenly as they can be divided
        self._parts = -(-environment.rows // batch_rows)
        self._collector: RolloutCollector | None = None
        self._rollout: RolloutBatch | None = None

    @property
    def batches(self) -> int:
        return self._passes * self._parts

    @property
    def rows_continue(self) -> bool:
        return False

    def attach(self, model: nn.Module) -> None:
        if not isinstance(model, ActingPolicy):
            raise UserError(f"a {type(model).__name__} does not act in environments; `manyformer list` shows policies")
        self._collector = RolloutCollector(self.environment, model, self.settings)
        self._collector.begin(row_seeds(self.seed, self.environment.rows))

    def __next__(self) -> RolloutBatch:
        # at the beginning of an epoch, with the weights of the moment
        if self._rollout is None:
            self._rollout = self._attached.collect()
        pass_number, part = divmod(self.batch, self._parts)
        # from the position alone, so that a run that is resumed divides the rows likewise
        generator = random_generator(self.seed, self.epoch, pass_number)
        rows = np.array_split(generator.permutation(self.environment.rows), self._parts)[part]
        batch: RolloutBatch = tree_map(lambda tensor: tensor[rows], self._rollout)
        self.batch += 1
        if self.batch == self.batches:
            self.epoch = self.epoch + 1
            self.batch = 0
            self._rollout = None
        return batch

    def shard(self, rank: int, world_size: int) -> "RolloutFeed":
        raise UserError("a policy is trained by one process: set devices=1")

    def write_files(self, folder: Path) -> None:
        # the rollout of the current epoch too: its remaining batches cannot be collected again
        write_collector(self._attached, self._rollout, folder)

    def read_files(self, files: VerifiedFolder) -> None:
        self._rollout = read_collector(self._attached, files)

    def training_scores(self) -> Mapping[str, float]:
        return self._attached.scores

    @property
    def _attached(self) -> RolloutCollector:
        assert self._collector is not None, "the feed is attached to its model before the first batch"
        return self._collector


SPLITS = ("valid", "test")


@final
class EpisodeEpoch(Epoch):
    """One batch of held-out episodes, whose environment is made once."""

    def __init__(self, data: EnvironmentData, split: str) -> None:
        self._data = data
        self._split = split
        # a cached function instead of an environment: it is made when episodes are played first
        self._make = functools.lru_cache(maxsize=1)(functools.partial(_make, data))

    def __len__(self) -> int:
        return 1

    def batch(self, number: int) -> EpisodeBatch:
        # the same episodes in every run, others in each split
        seeds = row_seeds(FIXED_SEED + SPLITS.index(self._split), self._data.valid)
        return EpisodeBatch(torch.from_numpy(seeds), self._make)


def open_environment(data: EnvironmentData, form: str, request: OpenRequest) -> OpenedData:
    """Make the environments of a policy. Raises UserError for one that is unknown or has spaces of another form."""
    if request.batch_tokens < data.steps:
        raise UserError(
            f"batch.tokens is {request.batch_tokens}, less than the {data.steps} steps of one row (data.steps); set it "
            f"to {data.steps} or more"
        )
    environment = _make(data, data.rows)
    objective = ClippedObjective(
        clip=data.clip,
        value_weight=data.value_weight,
        entropy_weight=data.entropy_weight,
        normalize_advantages=data.normalize_advantages,
    )
    batch_rows = min(data.rows, request.batch_tokens // data.steps)
    feed = RolloutFeed(
        environment,
        RolloutSettings(data.steps, data.discount, data.gae_lambda, objective),
        passes=data.passes,
        batch_rows=batch_rows,
        seed=request.seed,
        # without `valid`: another number of held-out episodes changes nothing in training
        fingerprint=json_text(
            [data.model_dump(mode="json", exclude={"valid"}), batch_rows], sort_keys=True, ensure_ascii=True
        ),
    )
    held_out = {split: HeldOutBatches(EpisodeEpoch(data, split), None) for split in SPLITS}
    tokenizer = NoTokenizer()
    return OpenedData(
        tokenizers=TokenizerPair(tokenizer, tokenizer),
        train=feed,
        valid=held_out["valid"],
        test=held_out["test"],
        summary_lines=tuple(_summary_lines(data, environment)),
        length_limits=(),
        cache=request.cache,
        required_keywords=_space_keywords(environment),
    )


def held_out_episodes(data: EnvironmentData, form: str, request: OpenRequest, split: str | None) -> EvaluationData:
    """The episodes of a held-out split, by default test."""
    name = split or "test"
    return EvaluationData(name, HeldOutBatches(EpisodeEpoch(data, name), None))


def refuse_episode_file(
    data: EnvironmentData, form: str, tokenizers: TokenizerPair, path: EvaluationPath, request: OpenRequest
) -> EvaluationData:
    """Raise UserError, since a policy is scored by episodes that it plays."""
    raise UserError(
        f"{path_name(path)}: a policy is scored by the episodes that it plays; score its split valid or test"
    )


def _make(data: EnvironmentData, rows: int) -> VectorEnvironment:
    return make_environment(data.environment, rows, data.options)


def _space_keywords(environment: VectorEnvironment) -> dict[str, Any]:
    """The keywords of a recipe that the spaces of an environment decide."""
    return {
        "observations": environment.observations.keyword,
        "actions": environment.actions.size,
        "continuous": isinstance(environment.actions, BoxActions),
    }


def _summary_lines(data: EnvironmentData, environment: VectorEnvironment) -> list[str]:
    space = environment.observations
    actions = environment.actions
    if isinstance(space, PixelSpace):
        observed = f"images of {space.keyword}"
    else:
        observed = f"vectors of {space.size}"
    if isinstance(actions, BoxActions):
        chosen = f"vectors of {actions.size} numbers"
    else:
        chosen = f"{actions.size} actions"
    options = "".join(f", {name} {value}" for name, value in data.options.items())
    longest = ""
    if environment.longest is not None:
        longest = f"; episodes of at most {environment.longest:,} steps"
    return [
        f"environment: {data.environment}{options}; observations are {observed}, {chosen}{longest}",
        f"rollouts of {data.rows:,} x {data.steps:,} steps, {data.passes} passes over each; held out: {data.valid:,} "
        "episodes",
    ]


ENVIRONMENT = register(
    DataKind(
        section=EnvironmentData,
        forms=("episodes",),
        open=open_environment,
        held_out=held_out_episodes,
        from_file=refuse_episode_file,
        cache_is_shared=True,
    )
)
