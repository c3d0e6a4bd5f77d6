"""The training batches of a policy: rollouts with its current weights, and several passes over each."""

from collections.abc import Mapping
from pathlib import Path
from typing import final

import numpy as np
from torch import nn

from manyformer.batches.episode_batches import RolloutBatch
from manyformer.core import tree_map
from manyformer.data.epochs import random_generator
from manyformer.data.training_feed import FeedPosition, TrainingFeed
from manyformer.environments import VectorEnvironment, row_seeds
from manyformer.errors import UserError
from manyformer.files.verified_folder import VerifiedFolder
from manyformer.rollouts import (
    EPISODE_SCORES,
    ROLLOUT_DIAGNOSTICS,
    ActingPolicy,
    RolloutCollector,
    RolloutSettings,
    read_collector,
    write_collector,
)


@final
class RolloutFeed(TrainingFeed):
    """Collects a rollout at the beginning of each epoch, and divides its rows anew into batches in each of the passes.

    `batch_rows` is the largest number of rows of a batch. A batch holds whole rows, so that the memory of a policy
    reaches as far as while it acted.
    """

    diagnostics = frozenset(ROLLOUT_DIAGNOSTICS)
    score_names = (*EPISODE_SCORES, *ROLLOUT_DIAGNOSTICS)

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
        self.environment, self.settings = environment, settings
        self._passes, self._parts = passes, -(-environment.rows // batch_rows)
        self._seed, self._fingerprint = seed, fingerprint
        self._collector: RolloutCollector | None = None
        self._rollout: RolloutBatch | None = None
        self.epoch = self.batch = 0

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
        self._collector.begin(row_seeds(self._seed, self.environment.rows))

    def __next__(self) -> RolloutBatch:
        if self._rollout is None:
            self._rollout = self._attached.collect()
        pass_number, part = divmod(self.batch, self._parts)
        generator = random_generator(self._seed, self.epoch, pass_number)
        rows = np.array_split(generator.permutation(self.environment.rows), self._parts)[part]
        batch: RolloutBatch = tree_map(lambda tensor: tensor[rows], self._rollout)
        self.batch += 1
        if self.batch == self.batches:
            self.epoch, self.batch, self._rollout = self.epoch + 1, 0, None
        return batch

    def shard(self, rank: int, world_size: int) -> "RolloutFeed":
        raise UserError("a policy is trained by one process: set devices=1")

    def state_dict(self) -> FeedPosition:
        return {"epoch": self.epoch, "batch": self.batch, "seed": self._seed, "data": self._fingerprint}

    def load_state_dict(self, state: FeedPosition) -> None:
        if state["data"] != self._fingerprint:
            raise UserError(
                "the environment or its settings differ from those of this run's checkpoint; restore them, or start a "
                "new run"
            )
        if state["seed"] != self._seed:
            raise UserError(f"this run was started with seed {state['seed']}, but the seed is {self._seed}")
        if state["batch"] >= self.batches:
            raise UserError(f"the saved position is batch {state['batch']} of an epoch of {self.batches}")
        self.epoch, self.batch = state["epoch"], state["batch"]

    def write_files(self, folder: Path) -> None:
        write_collector(self._attached, self._rollout, folder)

    def read_files(self, files: VerifiedFolder) -> None:
        self._rollout = read_collector(self._attached, files)

    def training_scores(self) -> Mapping[str, float]:
        return self._attached.scores

    @property
    def _attached(self) -> RolloutCollector:
        assert self._collector is not None, "the feed is attached to its model before the first batch"
        return self._collector
