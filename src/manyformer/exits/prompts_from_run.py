"""What a model is to write to: held-out sources with their translations, or beginnings of held-out texts."""

from pathlib import Path
from typing import NamedTuple

import torch

from manyformer.api import load
from manyformer.batches import CausalLMBatch
from manyformer.core import PADDING_SEGMENT
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import split_of
from manyformer.exits.early_decoding import DecodingWorkload
from manyformer.models import EncoderDecoder
from manyformer.recipes import get_recipe
from manyformer.train.run_folder import as_run

BEGINNING, CONTINUED = 32, 32
"""Tokens of a text that a language model is given, and that it writes, unless asked for more or fewer."""


class PromptSet(NamedTuple):
    """What there is to write, and what would have been right, where that is known."""

    task: DecodingWorkload
    references: list[str] | None


def material(
    run: str | Path,
    *,
    split: str | None = "valid",
    count: int = 300,
    max_new: int | None = None,
    rows: int = 32,
    device: str = "cpu",
) -> PromptSet:
    """`count` prompts of a run's held-out data, spread evenly over it, for its final model, `rows` of them at a time.

    Raises UserError where there are none.
    """
    folder = Path(run)
    if count < 1:
        raise UserError(f"{count} prompts: there must be at least one")
    record = as_run(folder)
    task = get_recipe(record.recipe).card.task
    model = load(folder).to(device)
    if model.tokenizer is None:
        raise UserError(f"the model in {folder} was saved without a tokenizer, so it cannot read or write text")
    held = split_of(record, task, folder, split)
    if isinstance(model, EncoderDecoder):
        pairs = [one for one in held.examples if one.source.strip()]
        chosen = [pairs[number] for number in evenly_spaced_indices(len(pairs), count)]
        prompts, references = [one.source for one in chosen], [one.target for one in chosen]
        return PromptSet(DecodingWorkload(model, prompts, max_new, rows), references)
    if held.held is None:
        raise UserError(f"a {record.recipe} writes nothing, so no token leaves it early")
    begun: list[list[int]] = []
    for batch in held.held:
        assert isinstance(batch, CausalLMBatch)
        there = torch.ones_like(batch.tokens) if batch.segments is None else batch.segments != PADDING_SEGMENT
        begun += [row[real.bool()][:BEGINNING].tolist() for row, real in zip(batch.tokens, there)]
    texts = [model.tokenizer.decode(row) for row in begun]
    texts = [text for text in texts if text.strip()]
    chosen_texts = [texts[number] for number in evenly_spaced_indices(len(texts), count)]
    return PromptSet(DecodingWorkload(model, chosen_texts, CONTINUED if max_new is None else max_new, rows), None)


def evenly_spaced_indices(there: int, wanted: int) -> list[int]:
    """So many numbers below `there`, evenly spread; all of them where there are fewer. Raises UserError for none."""
    if not there:
        raise UserError("there is nothing held out to write to")
    count = min(there, wanted)
    return [number * there // count for number in range(count)]
