"""`tag`: a treebank's words with the labels that a trained tagger gives them."""

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
from manyformer.data.open_trees import tagged_rows
from manyformer.data.padded_examples import TaggedDataset
from manyformer.data.text_files import NumberedLine
from manyformer.data.treebank import COLUMNS, SEPARATOR, TreebankSentence, treebank
from manyformer.errors import UserError
from manyformer.models import Tagger
from manyformer.train.run_folder import as_run

ROWS = 64
"""Sentences that are labelled together."""


class LabelledSentence(NamedTuple):
    """A sentence of the file, the label that each of its words was given, and its lines with these labels in them."""

    sentence: TreebankSentence
    labels: tuple[str, ...]
    lines: tuple[str, ...]


def tag(run: str | Path, path: str, *, device: str | None = None) -> Iterator[LabelledSentence]:
    """The sentences of the CoNLL-U file `path`, labelled by the tagger in the run's folder, in their order.

    Its trees are needed, its labels are not looked at. `device` None takes a GPU where there is one. Raises UserError
    for a run of another kind and for a bad file.
    """
    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{run} is no run's folder: {RUN_FILE} is missing, which says how to read data")
    record = as_run(folder)
    if not isinstance(record.data, TreesData):
        raise UserError(f"the run in {run} ({record.recipe}) labels no words; `manyformer evaluate` scores it")
    model = load(folder).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    assert isinstance(model, Tagger)
    tokenizers = load_tokenizers(folder / "model")
    assert tokenizers.labels is not None
    with tempfile.TemporaryDirectory(prefix="manyformer-") as room:
        bank = treebank(path, None, Path(room))
        rows = list(bank.rows())
        found = labels_of(model, tagged_rows(rows, tokenizers, Path(room)))
        for row, block, numbers in zip(rows, bank.blocks(), found, strict=True):
            labels = tuple(tokenizers.labels[number] for number in numbers)
            yield LabelledSentence(
                TreebankSentence.of(row), labels, tuple(_filled(block, labels, COLUMNS[record.data.label]))
            )


def labels_of(model: Tagger, tagged: TaggedDataset) -> Iterator[list[int]]:
    """The number of the likeliest label of each word, sentence after sentence."""
    for first in range(0, len(tagged.lengths), ROWS):
        batch = tagged.make(np.arange(first, min(first + ROWS, len(tagged.lengths))))
        there = (
            None if part is None else part.to(model.device) for part in (batch.tokens, batch.segments, batch.trees)
        )
        with torch.inference_mode():
            likeliest = model(*there).logits.argmax(-1).cpu()
        for row, words in zip(likeliest, batch.targets != IGNORE_INDEX):
            yield row[words].tolist()


def _filled(block: list[NumberedLine], labels: Sequence[str], column: int) -> Iterator[str]:
    """The lines of a sentence, the label of each word in its column."""
    following = iter(labels)
    for line in block:
        cells = line.text.split(SEPARATOR)
        if cells[0].isdecimal():
            cells[column] = next(following)
        yield SEPARATOR.join(cells)
