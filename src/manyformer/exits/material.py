"""What a model is to write to: held-out sources with their translations, or beginnings of held-out texts."""

from pathlib import Path
from typing import NamedTuple

import torch

from manyformer.batches import TextBatch
from manyformer.core import PADDING
from manyformer.errors import UserError
from manyformer.evaluate.held import split_of
from manyformer.exits.writing import Task
from manyformer.face import load
from manyformer.models import EncoderDecoder
from manyformer.recipes import get
from manyformer.train.folder import as_run

BEGINNING, CONTINUED = 32, 32
"""Tokens of a text that a language model is given, and that it writes, unless asked for more or fewer."""


class Material(NamedTuple):
    """What there is to write, and what would have been right, where that is known."""

    task: Task
    references: list[str] | None


def material(
    run: str | Path,
    *,
    split: str | None = "valid",
    count: int = 300,
    max_new: int | None = None,
    rows: int = 32,
    device: str = "cpu",
) -> Material:
    """`count` prompts of a run's held-out data, spread evenly over it, for its final model, `rows` of them at a time.

    Raises UserError where there are none.
    """
    folder = Path(run)
    if count < 1:
        raise UserError(f"{count} prompts: there must be at least one")
    record = as_run(folder)
    task = get(record.recipe).card.task
    model = load(folder).to(device)
    if model.tokenizer is None:
        raise UserError(f"the model in {folder} was saved without a tokenizer, so it cannot read or write text")
    held = split_of(record, task, folder, split)
    if isinstance(model, EncoderDecoder):
        pairs = [one for one in held.examples if one.source.strip()]
        chosen = [pairs[number] for number in spread(len(pairs), count)]
        prompts, references = [one.source for one in chosen], [one.target for one in chosen]
        return Material(Task(model, prompts, max_new, rows), references)
    if held.held is None:
        raise UserError(f"a {record.recipe} writes nothing, so no token leaves it early")
    begun: list[list[int]] = []
    for batch in held.held:
        assert isinstance(batch, TextBatch)
        there = torch.ones_like(batch.tokens) if batch.segments is None else batch.segments != PADDING
        begun += [row[real.bool()][:BEGINNING].tolist() for row, real in zip(batch.tokens, there)]
    texts = [model.tokenizer.decode(row) for row in begun]
    texts = [text for text in texts if text.strip()]
    chosen_texts = [texts[number] for number in spread(len(texts), count)]
    return Material(Task(model, chosen_texts, CONTINUED if max_new is None else max_new, rows), None)


def spread(there: int, wanted: int) -> list[int]:
    """So many numbers below `there`, evenly spread; all of them where there are fewer. Raises UserError for none."""
    if not there:
        raise UserError("there is nothing held out to write to")
    count = min(there, wanted)
    return [number * there // count for number in range(count)]
