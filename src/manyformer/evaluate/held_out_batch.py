"""A held-out batch of a run, for the model to show what it attends to."""

from pathlib import Path

from manyformer.batches import Batch
from manyformer.evaluate.eval_data import open_run_or_model
from manyformer.tasks.requests import TaskTokenizers


def held_batch(run: str | Path, *, data: str | None = None) -> tuple[Batch, TaskTokenizers]:
    """The first batch of the test data of the run, or of its validation data, and its tokenizers.

    `data` is another file, in any format of training data. Raises UserError."""
    trained = open_run_or_model(run)
    with trained.open_data(None, data) as held_out:
        assert held_out.batches is not None
        return next(iter(held_out.batches)), trained.tokenizers
