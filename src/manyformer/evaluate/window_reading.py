"""Models with a memory on windows that are longer than their rows: read in pieces, from an empty memory on."""

from functools import reduce
from typing import final

from manyformer.batches import CausalLMBatch
from manyformer.context_windows import ContextWindows
from manyformer.core import State
from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.models.head import BatchScore


@final
class WindowReader(Model[CausalLMBatch]):
    """A model with a memory that reads each row of a batch in pieces of `length` tokens, the memory empty before it."""

    def __init__(self, model: Model[CausalLMBatch], length: int) -> None:
        super().__init__()
        self.model = model
        self.length = length

    def score(self, batch: CausalLMBatch, *, state: State = None) -> BatchScore:
        scores = list[BatchScore]()
        state = self.model.init_state(len(batch.tokens))
        for piece in batch.in_pieces(self.length):
            scores.append(self.model.score(piece, state=state))
            state = scores[-1].state
        return reduce(BatchScore.plus, scores)._replace(state=None)


def window_reader(model: Model, windows: ContextWindows, row_length: int) -> Model:
    """The model for rows that are `windows`: with a memory in pieces of `row_length` tokens, else as it is.

    Raises UserError for a context that is longer than the model allows.
    """
    check_context(model, windows, row_length)
    if model.carries_state:
        return WindowReader(model, row_length)
    return model


def check_context(model: Model, windows: ContextWindows, row_length: int) -> None:
    """Raise UserError for a context that is longer than the model, with a memory after `row_length` tokens, allows."""
    if model.carries_state:
        at_once = min(windows.context, row_length)
    else:
        at_once = windows.context
    if model.max_length is not None and at_once > model.max_length:
        raise UserError(f"the context ({windows.context}) must be at most {model.max_length}, the model's max_length")
