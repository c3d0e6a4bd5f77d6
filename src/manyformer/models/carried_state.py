"""What a language model remembers, carried from one batch to the next where the rows of the batches go on."""

from typing import final

from manyformer.batches import Batch
from manyformer.core import State
from manyformer.models.language_model import LanguageModel
from manyformer.models.model import BatchLoss, BatchScore, Model
from manyformer.training_hooks import StatefulAcrossBatches


def has_memory(model: Model) -> bool:
    """Whether `model` remembers tokens of earlier batches of the same rows."""
    return isinstance(model, LanguageModel) and any(isinstance(part, StatefulAcrossBatches) for part in model.modules())


@final
class CarriedState:
    """The state of all rows after the latest batch: None before the first one, and where there is nothing to carry.

    `goes_on` says that row r of each batch goes on with row r of the batch before it.
    """

    def __init__(self, model: Model, *, goes_on: bool) -> None:
        self.model = model
        self.on = goes_on and has_memory(model)
        self.rows = 0
        self.state: State = None

    def before(self, batch: Batch) -> State:
        """What to go on from: an empty state for rows that are not those of the batch before."""
        if not self.on:
            return None
        assert isinstance(self.model, LanguageModel)
        if self.state is None or self.rows != len(batch[0]):
            self.rows, self.state = len(batch[0]), self.model.init_state(len(batch[0]))
        return self.state

    def after(self, found: BatchLoss | BatchScore) -> None:
        """Take over what the model remembers now."""
        self.state = found.state
