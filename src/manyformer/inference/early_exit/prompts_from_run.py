"""Prompts from a run's data: sources with their translations, or beginnings of texts, each with its document."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from manyformer.base.errors import UserError
from manyformer.base.type_aliases import IntArray
from manyformer.data.batching.epochs import HeldOutBatches
from manyformer.data.pipeline.opened import EvaluationData, EvaluationPath
from manyformer.data.storage.cache_folder import load_prepared
from manyformer.data.storage.token_shards import TokenShard
from manyformer.data.text.text_overlap import find_overlap
from manyformer.inference.early_exit.early_decoding import DecodingWorkload
from manyformer.inference.evaluate.eval_data import TrainedRun, open_run, task_of_run
from manyformer.nn.batches import CausalLMBatch

PROMPT_TOKENS = 32
NEW_TOKENS = 32
"""Default lengths for language models: prompt tokens taken from a text, and new tokens to generate."""


class PromptSet(NamedTuple):
    """A model with its prompts, the reference texts where the data has them, and the document of each prompt.

    `source` describes the data.
    """

    workload: DecodingWorkload
    references: list[str] | None
    documents: list[int]
    source: str


class _Prompt(NamedTuple):
    text: str
    reference: str
    document: int


def load_prompts(
    run: str | Path,
    *,
    split: str | None = "valid",
    count: int = 200,
    max_new: int | None = None,
    rows: int = 32,
    device: str | None = None,
) -> PromptSet:
    """Load a run's final model with `count` prompts spread evenly over its held-out data, decoded `rows` at a time.

    A long document gives several prompts, none of which reaches into another document. Raises UserError where there are
    no prompts, or where the model cannot generate text.
    """
    trained = open_run(run)
    with trained.open_data(split, None) as data:
        prompts = list(_prompts(trained, data))
        return _prompt_set(trained, prompts, count, max_new, rows, device, f"{data.name} of {trained.folder}")


def load_calibration_prompts(
    run: str | Path,
    *,
    data: EvaluationPath | None = None,
    count: int = 500,
    max_new: int | None = None,
    rows: int = 32,
    device: str | None = None,
) -> PromptSet:
    """Load a run's final model with one prompt from each of `count` documents that are independent of the model.

    They are from the run's test data, or from the file `data`. Documents that are in the training or the validation
    data, too, and copies of another document are left out. Raises UserError for a run without test data if there is no
    file: on the validation data its checkpoint was chosen.
    """
    trained = open_run(run)
    with trained.open_data(None, data) as held_out:
        if data is None and held_out.name != "test":
            raise UserError(
                f"the run in {trained.folder} has no test data, and the checkpoint was chosen on its validation data, "
                "so that a guarantee needs other texts: give a file that the run has not read with --data, or train "
                "with data.test"
            )
        # reversed, so that the first prompt of each document is the one that stays
        prompts = {prompt.document: prompt for prompt in reversed(list(_prompts(trained, held_out)))}
        if held_out.text is None:
            dependent = set()
        else:
            dependent = _dependent_documents(trained, held_out.text)
        independent = [prompt for document, prompt in sorted(prompts.items()) if document not in dependent]
        if data is not None:
            source = held_out.name
        else:
            source = f"test of {trained.folder}"
        if left_out := len(prompts) - len(independent):
            source = f"{source}, {left_out:,} left out as they are in other data of the run or copies of others"
        return _prompt_set(trained, independent, count, max_new, rows, device, source)


def _prompt_set(
    trained: TrainedRun,
    prompts: list[_Prompt],
    count: int,
    max_new: int | None,
    rows: int,
    device: str | None,
    source: str,
) -> PromptSet:
    """The model with at most `count` of the prompts, at evenly spaced indices. Raises UserError if there are none."""
    if count < 1:
        raise UserError(f"the number of prompts is {count}; it must be at least 1")
    if not prompts:
        raise UserError(f"{source}: there are no prompts")
    model = trained.load_model(device)
    count = min(len(prompts), count)
    # spread over the whole data, whose documents may stand in an order
    chosen = [prompts[index * len(prompts) // count] for index in range(count)]
    is_translation = task_of_run(trained.config).takes_source
    # a translation has a limit of its own, from the length of its source
    limit = NEW_TOKENS if max_new is None and not is_translation else max_new
    workload = DecodingWorkload(model, [prompt.text for prompt in chosen], limit, rows)
    references = None
    if is_translation:
        references = [prompt.reference for prompt in chosen]
    return PromptSet(workload, references, [prompt.document for prompt in chosen], source)


def _prompts(trained: TrainedRun, data: EvaluationData) -> Iterator[_Prompt]:
    """All prompts of the data, those of a document in their order."""
    task = task_of_run(trained.config)
    if task.takes_source:
        for document, example in enumerate(data.examples):
            if example.source.strip():
                yield _Prompt(example.source, example.target, document)
        return
    if task.generates != "continuation" or data.batches is None:
        raise UserError(f"a {trained.config.recipe} does not generate text, so it has no early exits to decode with")
    if data.text is None:
        texts = _sequences(data.batches)
    else:
        texts = _documents(data.text)
    for document, tokens in texts:
        # prompts are so far apart that the text which would follow one is no part of the next
        for start in range(0, len(tokens), PROMPT_TOKENS + NEW_TOKENS):
            text = trained.tokenizers.source.decode(tokens[start : start + PROMPT_TOKENS])
            if text.strip():
                yield _Prompt(text, "", document)


def _documents(text: TokenShard) -> Iterator[tuple[int, IntArray]]:
    for document, (start, stop) in enumerate(zip(text.offsets[:-1], text.offsets[1:])):
        yield document, text.tokens[start:stop].astype(np.int64)


def _sequences(batches: HeldOutBatches) -> Iterator[tuple[int, IntArray]]:
    """The rows of data that is no text, each of which is a sequence of its own."""
    if batches.rows_continue:
        raise UserError("the sequences of this data are longer than a row, so that a row is no prompt")
    rows = 0
    for batch in batches:
        assert isinstance(batch, CausalLMBatch)
        yield from enumerate(batch.tokens.numpy(), rows)
        rows += len(batch.tokens)


def _dependent_documents(trained: TrainedRun, text: TokenShard) -> set[int]:
    """The documents that overlap with training or validation data, and all but the first of equal ones."""
    prepared = load_prepared(trained.folder / "data")
    if prepared is None:
        raise UserError(
            f"the data of {trained.folder} is missing, so that nobody knows whether the model has seen these texts: "
            f"repeat the run's train command, or copy {trained.folder / 'data'}"
        )
    dependent = set[int]()
    contents = set[bytes]()
    for document, tokens in _documents(text):
        # equal documents give equal losses, and would count as independent ones
        content = tokens.tobytes()
        if content in contents:
            dependent.add(document)
        contents.add(content)
    for name, shard in prepared.shards.items():
        # the documents of a text, or the sources of pairs
        split, _, side = name.partition(".")
        if split in ("train", "valid") and side in ("", "source"):
            dependent.update(find_overlap(text, shard, trained.tokenizers.source).overlapping.tolist())
    return dependent
