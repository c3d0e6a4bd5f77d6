"""The endless stream of training batches, in an order determined by a seed, with a position for checkpoints."""

from typing import final

from manyformer.batches import Batch
from manyformer.data.epochs import Epoch, EpochPlan, ProcessShare, read_batch
from manyformer.data.training_feed import FeedPosition, TrainingFeed
from manyformer.errors import UserError


@final
class Sampler(TrainingFeed):
    """Iterates over reshuffled epochs of a data set."""

    def __init__(self, plan: EpochPlan, seed: int, share: ProcessShare | None = None) -> None:
        self._plan, self._seed = plan, seed
        self._share = share or ProcessShare()
        self._cached_epoch: Epoch | None = None
        self.epoch = self.batch = 0

    @property
    def batches(self) -> int:
        return len(self._current_epoch())

    @property
    def rows_continue(self) -> bool:
        return self._current_epoch().rows_continue

    @property
    def reads_ahead(self) -> bool:
        return True

    def __next__(self) -> Batch:
        epoch = self._current_epoch()
        batch = read_batch(epoch, self.batch, self._share)
        self.batch += 1
        if self.batch == len(epoch):
            self.epoch, self.batch, self._cached_epoch = self.epoch + 1, 0, None
        return batch

    def shard(self, rank: int, world_size: int) -> "Sampler":
        assert 0 <= rank < world_size
        sampler = Sampler(self._plan, self._seed, ProcessShare(rank, world_size))
        sampler.epoch, sampler.batch = self.epoch, self.batch
        return sampler

    def state_dict(self) -> FeedPosition:
        return {"epoch": self.epoch, "batch": self.batch, "seed": self._seed, "data": self._plan.fingerprint}

    def load_state_dict(self, state: FeedPosition) -> None:
        if state["data"] != self._plan.fingerprint:
            raise UserError(
                "the data differs from what this run was trained on (in its text, tokenizer, lengths or batch size); "
                "restore the previous data, or start a new run"
            )
        if state["seed"] != self._seed:
            raise UserError(f"this run was started with seed {state['seed']}, but the seed is {self._seed}")
        self.epoch, self.batch, self._cached_epoch = state["epoch"], state["batch"], None
        if self.batch >= len(self._current_epoch()):
            raise UserError(f"the saved position is batch {self.batch} of an epoch of {len(self._current_epoch())}")

    def _current_epoch(self) -> Epoch:
        if self._cached_epoch is None:
            self._cached_epoch = self._plan.epoch(self._seed, self.epoch)
        return self._cached_epoch
