"""Training batches for ever, in an order that a seed decides, and a position in it that a checkpoint can keep."""

from collections.abc import Iterator
from typing import Any, final

from manyformer.batches import Batch
from manyformer.data.epochs import Epoch, EpochPlan, ProcessShare, shared
from manyformer.errors import UserError


@final
class Sampler(Iterator[Batch]):
    """Epoch after epoch, each shuffled anew; `epoch` counts the finished ones, `batch` the batches given since."""

    def __init__(self, plan: EpochPlan, seed: int, share: ProcessShare | None = None) -> None:
        self._plan, self._seed = plan, seed
        self._share = share or ProcessShare()
        self._now: Epoch | None = None
        self.epoch = self.batch = 0

    @property
    def batches(self) -> int:
        """How many batches the present epoch has."""
        return len(self._current())

    @property
    def goes_on(self) -> bool:
        """Whether row r of each batch goes on with row r of the batch before it."""
        return self._current().goes_on

    def __next__(self) -> Batch:
        now = self._current()
        batch = shared(now.batch(self.batch), self._share)
        self.batch += 1
        if self.batch == len(now):
            self.epoch, self.batch, self._now = self.epoch + 1, 0, None
        return batch

    def shard(self, rank: int, world: int) -> "Sampler":
        """From this position on, every `world`-th row of each batch: together the ranks see what one alone would."""
        assert 0 <= rank < world
        part = Sampler(self._plan, self._seed, ProcessShare(rank, world))
        part.epoch, part.batch = self.epoch, self.batch
        return part

    def state_dict(self) -> dict[str, Any]:
        """The position, for JSON: the same on every rank, and good for any number of ranks."""
        return {"epoch": self.epoch, "batch": self.batch, "seed": self._seed, "data": self._plan.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a position; UserError where it was a position in other data or another order."""
        if state["data"] != self._plan.fingerprint:
            raise UserError(
                "the data is not what this run was trained on up to here (other text, tokenizer, lengths or batch "
                "size); put the old data back, or start a new run"
            )
        if state["seed"] != self._seed:
            raise UserError(f"this run was started with seed {state['seed']}, and now the seed is {self._seed}")
        self.epoch, self.batch, self._now = int(state["epoch"]), int(state["batch"]), None

    def _current(self) -> Epoch:
        if self._now is None:
            self._now = self._plan.epoch(self._seed, self.epoch)
        return self._now
