"""`tag`: the predictions of a trained tagger for the words of a CoNLL-U file."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from manyformer.api import load
from manyformer.batches import IGNORE_INDEX
from manyformer.config import RUN_FILE, TreesData
from manyformer.data import load_tokenizers
from manyformer.data.open_trees import tagged_dataset_of_rows
from manyformer.data.padded_examples import TaggedDataset
from manyformer.data.text_files import NumberedLine
from manyformer.data.treebank import CELL_SEPARATOR, LABEL_COLUMNS, TreebankSentence, open_treebank
from manyformer.errors import UserError
from manyformer.models import Tagger
from manyformer.train.run_folder import as_run

ROWS = 64
"""Sentences in a batch."""


class LabelledSentence(NamedTuple):
    """A sentence of the file, the predicted label of each of its words, and its lines with these labels filled in."""

    sentence: TreebankSentence
    labels: tuple[str, ...]
    lines: tuple[str, ...]


def tag(run: str | Path, path: str, *, device: str | None = None) -> Iterator[LabelledSentence]:
    """Yield the sentences of the CoNLL-U file `path`, in order, labelled by the tagger in the run's folder.

    The trees of the file are used, its labels are not. `device` None selects a GPU if there is one. Raises UserError
    for a run of another kind and for a bad file.
    """
    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{run} is no run's folder: {RUN_FILE} is missing, which describes the data")
    record = as_run(folder)
    if not isinstance(record.data, TreesData):
        raise UserError(f"the run in {run} ({record.recipe}) labels no words; `manyformer evaluate` scores it")
    model = load(folder).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    assert isinstance(model, Tagger)
    tokenizers = load_tokenizers(folder / "model")
    assert tokenizers.labels is not None
    with tempfile.TemporaryDirectory(prefix="manyformer-") as scratch_dir:
        treebank_file = open_treebank(path, None, Path(scratch_dir))
        rows = list(treebank_file.rows())
        label_ids = predict_labels(model, tagged_dataset_of_rows(rows, tokenizers, Path(scratch_dir)))
        for row, lines, row_label_ids in zip(rows, treebank_file.blocks(), label_ids, strict=True):
            labels = tuple(tokenizers.labels[label_id] for label_id in row_label_ids)
            yield LabelledSentence(
                TreebankSentence.from_row(row),
                labels,
                tuple(_insert_labels(lines, labels, LABEL_COLUMNS[record.data.label])),
            )


def predict_labels(model: Tagger, tagged: TaggedDataset) -> Iterator[list[int]]:
    """Yield the most likely label id of each word, sentence by sentence."""
    for start in range(0, len(tagged.lengths), ROWS):
        batch = tagged.make_batch(np.arange(start, min(start + ROWS, len(tagged.lengths))))
        inputs = (
            None if tensor is None else tensor.to(model.device)
            for tensor in (batch.tokens, batch.segments, batch.trees)
        )
        with torch.inference_mode():
            label_ids = model(*inputs).logits.argmax(-1).cpu()
        for row, is_word in zip(label_ids, batch.targets != IGNORE_INDEX):
            yield row[is_word].tolist()


def _insert_labels(lines: list[NumberedLine], labels: Sequence[str], column: int) -> Iterator[str]:
    """Yield the lines of a sentence, with the label of each word in its column."""
    remaining = iter(labels)
    for line in lines:
        cells = line.text.split(CELL_SEPARATOR)
        if cells[0].isdecimal():
            cells[column] = next(remaining)
        yield CELL_SEPARATOR.join(cells)
