"""Held-out images of a run, for the model to complete."""

from itertools import islice
from pathlib import Path

import numpy as np

from manyformer.batches import CausalLMBatch
from manyformer.config import ImagesData
from manyformer.data.pixel_tokenizer import PixelTokenizer
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import open_run
from manyformer.type_aliases import ImageArray


def held_images(run: str | Path, count: int, *, data: str | None = None) -> ImageArray:
    """The first `count` images (n, h, w, c) of the shuffled test data of the run, or of its validation data.

    `data` are other images, in any format of training data. The order is always the same. Raises UserError.
    """
    trained = open_run(run)
    if not isinstance(trained.config.data, ImagesData):
        raise UserError(f"the run in {run} ({trained.config.recipe}) was not trained on images")
    tokenizer = trained.tokenizers.source
    assert isinstance(tokenizer, PixelTokenizer)
    with trained.open_data(None, data) as held_out:
        assert held_out.batches is not None
        rows = (row for batch in held_out.batches if isinstance(batch, CausalLMBatch) for row in batch.targets)
        return np.stack([tokenizer.image(row) for row in islice(rows, count)])
