"""`predict`: the labels that a trained classifier or tagger assigns to texts, sentences, images or recordings."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from manyformer.data.kind import OpenRequest, kind_of, no_log
from manyformer.data.opened import UnlabelledInput
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import open_run_or_model, task_of_run
from manyformer.system.devices import SMALLER_WORK, report_missing_operator, report_out_of_memory
from manyformer.system.temporary_folders import temporary_folder
from manyformer.tasks import Prediction, PredictionRequest
from manyformer.type_aliases import LogFn


class PredictedInput(NamedTuple):
    """An input and its most likely labels, or those of each of its words."""

    input: UnlabelledInput
    prediction: Prediction


def predict(
    run: str | Path, path: str, *, top: int = 1, device: str | None = None, log: LogFn = no_log
) -> Iterator[PredictedInput]:
    """Yield the `top` most likely labels of each input in `path`, in order, by the final model of the run.

    `path` is what the run's kind of data calls a file: lines of text or JSONL for texts, CoNLL-U for words, an image
    file, folder or archive for images and recordings; "-" is standard input. `device` None selects a GPU if there is
    one. `log` receives a line for each change of what is in the files, such as another sampling rate. Raises UserError
    for a run whose model predicts no labels and for a bad file.
    """
    if top < 1:
        raise UserError(f"top is {top}; it must be at least 1")
    trained = open_run_or_model(run)
    record = trained.config
    tokenizers = trained.tokenizers
    task = task_of_run(record)
    read_inputs = kind_of(record.data).unlabelled
    if task.command != "predict" or read_inputs is None:
        raise UserError(
            f"the run in {run} ({record.recipe}) predicts no labels, it is for {task.title}; "
            f"use `manyformer {task.command} {run}`"
        )
    model = trained.load_model(device)
    with (
        report_out_of_memory(f"in the predictions of {run}", SMALLER_WORK),
        report_missing_operator(trained.config.recipe),
        temporary_folder() as scratch_dir,
        torch.inference_mode(),
    ):
        data = read_inputs(record.data, tokenizers, path, OpenRequest(record.batch.tokens, scratch_dir, log=log))
        request = PredictionRequest(
            model=model,
            tokenizers=tokenizers,
            batches=data.batches,
            texts=data.texts,
            pairs=data.pairs,
            row_length=record.data.row_length,
            section=record.data,
            top=top,
        )
        for item, prediction in zip(data.inputs, task.predict(request), strict=True):
            yield PredictedInput(item, prediction)
