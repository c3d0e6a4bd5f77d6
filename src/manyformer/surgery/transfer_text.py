"""Batches of a text file for attention transfer, tokenized as a model's training text was."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from manyformer.batches import Batch
from manyformer.config import TextData
from manyformer.data import Tokenizer, TokenizerPair
from manyformer.data.kind import OpenRequest
from manyformer.data.opening import open_file
from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.recipes.registry import task_of
from manyformer.system.temporary_folders import temporary_folder

ROW_TOKENS = 256
"""The length of rows, for models that allow it."""

BATCH_TOKENS = 2048
"""The tokens of a batch."""


@contextmanager
def transfer_batches(model: Model, path: str | Path) -> Iterator[Iterator[Batch]]:
    """The batches of a text file in order, again and again; prepared files are removed at the end.

    Raises UserError for a model without a tokenizer or of a task that reads no text, and for a file that holds none."""
    tokenizer, form = model.tokenizer, task_of(model).data_forms.get("text")
    if form is None or not isinstance(tokenizer, Tokenizer):
        lacks = "has no tokenizer" if form is not None else "reads no plain text"
        raise UserError(f"this {model.spec.recipe} {lacks}, so attention cannot be transferred on the text of {path}")
    data = TextData(length=min(ROW_TOKENS, model.max_length or ROW_TOKENS), packing="concat")
    with temporary_folder() as scratch_dir:
        request = OpenRequest(BATCH_TOKENS, scratch_dir)
        batches = open_file(data, form, TokenizerPair(tokenizer, tokenizer), str(path), request).batches
        assert batches is not None
        if not len(batches):
            raise UserError(f"{path} holds less text than one row of {data.length} tokens")
        yield itertools.chain.from_iterable(itertools.repeat(batches))
