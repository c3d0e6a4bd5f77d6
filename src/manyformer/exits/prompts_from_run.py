"""Prompts from a run's held-out data: sources with their translations, or beginnings of texts."""

from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from manyformer.api import load
from manyformer.batches import CausalLMBatch
from manyformer.core import PADDING_SEGMENT
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import load_split
from manyformer.exits.early_decoding import DecodingWorkload
from manyformer.recipes import get_recipe
from manyformer.train.run_folder import as_run

T = TypeVar("T")

PROMPT_TOKENS, NEW_TOKENS = 32, 32
"""Default lengths for language models: prompt tokens taken from a text, and new tokens to generate."""


class PromptSet(NamedTuple):
    """A model with its prompts, and the reference texts where the data has them."""

    workload: DecodingWorkload
    references: list[str] | None


def load_prompts(
    run: str | Path,
    *,
    split: str | None = "valid",
    count: int = 300,
    max_new: int | None = None,
    rows: int = 32,
    device: str = "cpu",
) -> PromptSet:
    """Load a run's final model with `count` prompts spread evenly over its held-out data, decoded `rows` at a time.

    Raises UserError where there are no prompts, or where the model cannot generate text.
    """
    folder = Path(run)
    if count < 1:
        raise UserError(f"the number of prompts is {count}; it must be at least 1")
    record = as_run(folder)
    task = get_recipe(record.recipe).card.task
    model = load(folder).to(device)
    if model.tokenizer is None:
        raise UserError(f"the model in {folder} was saved without a tokenizer, so it cannot read or write text")
    data = load_split(record, folder, split)
    if task.takes_source:
        chosen = _take_evenly([example for example in data.examples if example.source.strip()], count)
        prompts, references = [example.source for example in chosen], [example.target for example in chosen]
        return PromptSet(DecodingWorkload(model, prompts, max_new, rows), references)
    if task.generates != "continuation" or data.batches is None:
        raise UserError(f"a {record.recipe} does not generate text, so it has no early exits to decode with")
    prompt_ids: list[list[int]] = []
    for batch in data.batches:
        assert isinstance(batch, CausalLMBatch)
        valid = torch.ones_like(batch.tokens) if batch.segments is None else batch.segments != PADDING_SEGMENT
        prompt_ids += [row[row_valid.bool()][:PROMPT_TOKENS].tolist() for row, row_valid in zip(batch.tokens, valid)]
    texts = _take_evenly([text for text in map(model.tokenizer.decode, prompt_ids) if text.strip()], count)
    return PromptSet(DecodingWorkload(model, texts, NEW_TOKENS if max_new is None else max_new, rows), None)


def _take_evenly(examples: list[T], count: int) -> list[T]:
    """At most `count` examples at evenly spaced indices. Raises UserError if there are none."""
    if not examples:
        raise UserError("the held-out data is empty, so there are no prompts")
    count = min(len(examples), count)
    return [examples[index * len(examples) // count] for index in range(count)]
