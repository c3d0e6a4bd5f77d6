"""What a language model remembers, carried from one batch to the next where the rows of the batches go on."""

from typing import final

from manyformer.batches import Batch
from manyformer.core import State
from manyformer.hooks import Carried
from manyformer.models.base import Loss, Model, Score
from manyformer.models.language_model import LanguageModel


def has_memory(model: Model) -> bool:
    """Whether `model` remembers tokens of earlier batches of the same rows."""
    return isinstance(model, LanguageModel) and any(isinstance(part, Carried) for part in model.modules())


@final
class Carrying:
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
            self.rows, self.state = len(batch[0]), self.model.start(len(batch[0]))
        return self.state

    def after(self, found: Loss | Score) -> None:
        """Take over what the model remembers now."""
        self.state = found.state
