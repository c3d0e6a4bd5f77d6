"""Images that a run held out, for a model of images to complete."""

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
from manyformer.evaluate.eval_data import file_of, split_of
from manyformer.train.run_folder import as_run

TASK = "language-model"


def held_images(run: str | Path, count: int, *, data: str | None = None) -> NDArray[np.uint8]:
    """`count` images (n, h, w, c) of the test data of the run in the folder `run`, else of its validation data.

    `data` are other images, in any form that a run learns from. Always the same ones, mixed. Raises UserError.
    """
    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{run} is no run's folder: {RUN_FILE} is missing, which says where its images are")
    record = as_run(folder)
    if not isinstance(record.data, ImagesData):
        raise UserError(f"the run in {run} ({record.recipe}) did not learn from images")
    tokenizers = load_tokenizers(folder / "model")
    levels = tokenizers.source
    assert isinstance(levels, PixelTokenizer)
    with tempfile.TemporaryDirectory(prefix="manyformer-") as room:
        if data is None:
            held = split_of(record, TASK, folder, None).held
        else:
            held = file_of(record, TASK, tokenizers, data, Path(room)).held
        assert held is not None
        rows = (row for batch in held if isinstance(batch, CausalLMBatch) for row in batch.targets)
        return np.stack([levels.image(row) for row in islice(rows, count)])
