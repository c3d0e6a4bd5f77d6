"""Held-out images of a run, for the model to complete."""

import tempfile
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyformer.batches import CausalLMBatch
from manyformer.config import RUN_FILE, ImagesData
from manyformer.data import load_tokenizers
from manyformer.data.pixel_tokenizer import PixelTokenizer
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import load_file, load_split
from manyformer.train.run_folder import as_run


def held_images(run: str | Path, count: int, *, data: str | None = None) -> NDArray[np.uint8]:
    """The first `count` images (n, h, w, c) of the shuffled test data of the run, or of its validation data.

    `data` are other images, in any format of training data. The order is always the same. Raises UserError.
    """
    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{run} is no run's folder: {RUN_FILE} is missing, which names its images")
    record = as_run(folder)
    if not isinstance(record.data, ImagesData):
        raise UserError(f"the run in {run} ({record.recipe}) was not trained on images")
    tokenizers = load_tokenizers(folder / "model")
    tokenizer = tokenizers.source
    assert isinstance(tokenizer, PixelTokenizer)
    with tempfile.TemporaryDirectory(prefix="manyformer-") as scratch_dir:
        if data is None:
            batches = load_split(record, folder, None).batches
        else:
            batches = load_file(record, tokenizers, data, Path(scratch_dir)).batches
        assert batches is not None
        rows = (row for batch in batches if isinstance(batch, CausalLMBatch) for row in batch.targets)
        return np.stack([tokenizer.image(row) for row in islice(rows, count)])
