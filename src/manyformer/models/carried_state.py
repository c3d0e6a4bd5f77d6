"""The recurrent state of a language model, carried from batch to batch where the rows of the batches continue."""

from typing import final

from torch import Tensor

from manyformer.batches import Batch
from manyformer.core import State, tree_map
from manyformer.models.model import Model
from manyformer.models.output_head import BatchLoss, BatchScore


@final
class CarriedState:
    """The state of all rows after the latest batch; None before the first batch, and for models without such a state.

    `rows_continue` states that row r of each batch continues row r of the previous batch.
    """

    def __init__(self, model: Model, *, rows_continue: bool) -> None:
        self.model = model
        self.enabled = rows_continue and model.carries_state
        self.rows = 0
        self.state: State = None

    def state_for(self, batch: Batch) -> State:
        """The state to continue from; an empty one if the number of rows differs from that of the previous batch."""
        if not self.enabled:
            return None
        if self.state is None or self.rows != len(batch[0]):
            self.rows, self.state = len(batch[0]), self.model.init_state(len(batch[0]))
        return self.state

    def update(self, result: BatchLoss | BatchScore) -> None:
        """Store the state after the batch, of which the next batch gets no gradient."""
        self.state = tree_map(Tensor.detach, result.state)
