"""The endless stream of training batches, in an order determined by a seed, with a position for checkpoints."""

from collections.abc import Iterator
from typing import final

from typing_extensions import TypedDict

from manyformer.batches import Batch
from manyformer.data.epochs import Epoch, EpochPlan, ProcessShare, select_rows
from manyformer.errors import UserError
from manyformer.files.json_records import Count


class SamplerState(TypedDict):
    """The position of a sampler, with its seed and the fingerprint of its data."""

    epoch: Count
    batch: Count
    seed: int
    data: str


@final
class Sampler(Iterator[Batch]):
    """Iterates over reshuffled epochs; `epoch` counts completed epochs, `batch` the batches of the current one."""

    def __init__(self, plan: EpochPlan, seed: int, share: ProcessShare | None = None) -> None:
        self._plan, self._seed = plan, seed
        self._share = share or ProcessShare()
        self._cached_epoch: Epoch | None = None
        self.epoch = self.batch = 0

    @property
    def batches(self) -> int:
        """The number of batches in the current epoch."""
        return len(self._current_epoch())

    @property
    def rows_continue(self) -> bool:
        """Whether row r of each batch continues row r of the previous batch."""
        return self._current_epoch().rows_continue

    def __next__(self) -> Batch:
        epoch = self._current_epoch()
        batch = select_rows(epoch.batch(self.batch), self._share)
        self.batch += 1
        if self.batch == len(epoch):
            self.epoch, self.batch, self._cached_epoch = self.epoch + 1, 0, None
        return batch

    def shard(self, rank: int, world_size: int) -> "Sampler":
        """A sampler from this position with every `world`-th row of each batch; all ranks together cover every row."""
        assert 0 <= rank < world_size
        sampler = Sampler(self._plan, self._seed, ProcessShare(rank, world_size))
        sampler.epoch, sampler.batch = self.epoch, self.batch
        return sampler

    def state_dict(self) -> SamplerState:
        """The position as JSON values: equal on every rank, and valid for any number of ranks."""
        return {"epoch": self.epoch, "batch": self.batch, "seed": self._seed, "data": self._plan.fingerprint}

    def load_state_dict(self, state: SamplerState) -> None:
        """Move to a saved position. Raises UserError if it belongs to different data or a different order."""
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
