"""The interface of endless streams of training batches, whose position is saved in checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import nn
from typing_extensions import TypedDict

from manyformer.batches import Batch
from manyformer.files.json_records import Count
from manyformer.files.verified_folder import VerifiedFolder


class FeedPosition(TypedDict):
    """The position of a feed, with its seed and the fingerprint of its data."""

    epoch: Count
    batch: Count
    seed: int
    data: str


class TrainingFeed(Iterator[Batch], ABC):
    """An endless stream of training batches; `epoch` counts completed epochs, `batch` the batches of the current one.

    A feed whose batches depend on the model, such as what a policy does in environments, is attached to the model and
    has files of its own in a checkpoint.
    """

    epoch: int
    batch: int
    score_names: tuple[str, ...] = ()
    """The names of the scores that `training_scores` may have."""
    diagnostics: frozenset[str] = frozenset()
    """Those of them that go to the metrics alone, not to the lines of progress."""

    @property
    @abstractmethod
    def batches(self) -> int:
        """The number of batches in the current epoch."""

    @property
    @abstractmethod
    def rows_continue(self) -> bool:
        """Whether row r of each batch continues row r of the previous batch."""

    @property
    def reads_ahead(self) -> bool:
        """Whether its position alone decides the next batch, so that a thread may read it while others are trained on.

        False where batches depend on the weights of the moment, or where the feed has scores or files of its own."""
        return False

    @abstractmethod
    def shard(self, rank: int, world_size: int) -> "TrainingFeed":
        """A feed from this position with a share of the rows of each batch; all ranks together cover every row."""

    @abstractmethod
    def state_dict(self) -> FeedPosition:
        """The position as JSON values: equal on every rank, and valid for any number of ranks."""

    @abstractmethod
    def load_state_dict(self, state: FeedPosition) -> None:
        """Move to a saved position. Raises UserError if it belongs to different data or a different order."""

    def attach(self, model: nn.Module) -> None:
        """Take the model that is trained on this feed; called once, before the first batch."""

    def write_files(self, folder: Path) -> None:
        """Write what the position does not say into the folder of a checkpoint; the main process alone calls it."""

    def read_files(self, files: VerifiedFolder) -> None:
        """Restore what `write_files` wrote; called after `load_state_dict`. Raises DamagedFile."""

    def close(self) -> None:
        """End what the feed has running beside the training; its next batch, if one is taken, is the same."""

    def training_scores(self) -> Mapping[str, float]:
        """Scores of the latest training data for people, such as the mean return of its episodes."""
        return {}
