"""Held-out images of a run, for the model to complete, or to show what it attends to."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from manyformer.batches import Batch, CausalLMBatch, ImageClassificationBatch, Seq2SeqBatch
from manyformer.config import ImagesData, ModalitiesData
from manyformer.data.kind import no_log
from manyformer.data.pixel_tokenizer import PixelTokenizer
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import open_run_or_model
from manyformer.type_aliases import ImageArray, LogFn


def held_images(run: str | Path, count: int, *, data: str | None = None, log: LogFn = no_log) -> ImageArray:
    """The first `count` images (n, h, w, c) of the shuffled test data of the run, or of its validation data.

    `data` are other images, in any format of training data; the log is told what was changed in them. The order is
    always the same. Raises UserError.
    """
    trained = open_run_or_model(run)
    if not isinstance(trained.config.data, ImagesData | ModalitiesData):
        raise UserError(f"the run in {run} ({trained.config.recipe}) was not trained on images")
    with trained.open_data(None, data, log=log) as held_out:
        assert held_out.batches is not None
        images = (image for batch in held_out.batches for image in _batch_images(batch, trained.tokenizers.source))
        return np.stack(list(islice(images, count)))


def _batch_images(batch: Batch, tokenizer: object) -> Iterator[ImageArray]:
    """The images of a batch, which has their pixels, or captions of them, or their tokens as targets."""
    if isinstance(batch, ImageClassificationBatch):
        yield from batch.pixels.numpy()
        return
    if isinstance(tokenizer, PixelTokenizer):
        assert isinstance(batch, CausalLMBatch | Seq2SeqBatch)
        for row in batch.targets:
            yield tokenizer.image(row)
        return
    assert isinstance(batch, Seq2SeqBatch)
    yield from batch.source.numpy()
