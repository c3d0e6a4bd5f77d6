"""`transcribe_files`: what a trained model writes about recordings."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.batches import to_device
from manyformer.core import PADDING_SEGMENT
from manyformer.data.kind import OpenRequest, kind_of
from manyformer.data.opened import UnlabelledData
from manyformer.errors import UserError
from manyformer.evaluate.eval_data import TrainedRun, open_run, task_of_run
from manyformer.generate import SourceBatch, answer_sources, decoding_from_options
from manyformer.system.devices import SMALLER_WORK, report_missing_operator, report_out_of_memory
from manyformer.system.temporary_folders import temporary_folder


class Transcript(NamedTuple):
    """The location of a recording, what it says, and the natural logarithm of the probability of that text."""

    location: str
    text: str
    log_probability: float


def transcribe_files(
    run: str | Path, paths: Sequence[str], *, beam: int = 4, device: str | None = None
) -> Iterator[Transcript]:
    """Yield the transcript of each recording of the files in `paths`, in order, by the final model of the run.

    A file is a recording, a folder or another form that the run's kind of data reads; samples are converted to the
    rate of the run. Beam search of width `beam`: over prefixes for a model with CTC, over letters for one with a
    decoder. `device` None selects a GPU if there is one. Raises UserError for another run and for a bad file."""
    trained = open_transcriber(run)
    model: Any = trained.load_model(device)
    with (
        report_out_of_memory(f"in the transcripts of {run}", SMALLER_WORK),
        report_missing_operator(trained.config.recipe),
        torch.inference_mode(),
    ):
        for path in paths:
            with temporary_folder() as scratch_dir:
                data = _read_recordings(trained, path, scratch_dir)
                batches = (to_device(batch, model.device) for batch in data.batches or ())
                written = (row for batch in batches for row in _write(trained, model, batch, beam))
                for item, (text, log_probability) in zip(data.inputs, written, strict=True):
                    yield Transcript(item.name, text, log_probability)


def open_transcriber(run: str | Path) -> TrainedRun:
    """The run in a folder. Raises UserError unless its model transcribes recordings."""
    trained = open_run(run)
    task = task_of_run(trained.config)
    if task.command != "transcribe" or kind_of(trained.config.data).unlabelled is None:
        raise UserError(
            f"the run in {run} ({trained.config.recipe}) transcribes no recordings, it is for {task.title}; "
            f"use `manyformer {task.command} {run}`"
        )
    return trained


def first_recording(trained: TrainedRun, path: str) -> Float[Tensor, "1 f m"]:
    """The frames of the first recording at `path`, without padding. Raises UserError for a bad file."""
    with temporary_folder() as scratch_dir:
        data = _read_recordings(trained, path, scratch_dir)
        batch: Any = next(iter(data.batches or ()))
        frames: Tensor = batch.features[:1]
        if batch.segments is None:
            return frames
        return frames[:, batch.segments[0] != PADDING_SEGMENT]


def _read_recordings(trained: TrainedRun, path: str, scratch_dir: Path) -> UnlabelledData:
    read_inputs = kind_of(trained.config.data).unlabelled
    assert read_inputs is not None
    request = OpenRequest(trained.config.batch.tokens, scratch_dir)
    return read_inputs(trained.config.data, trained.tokenizers, path, request)


def _write(trained: TrainedRun, model: Any, batch: Any, beam: int) -> list[tuple[str, float]]:
    """The text of each recording of a batch and its log-probability."""
    tokenizer = trained.tokenizers.target
    if task_of_run(trained.config).generates is None:
        transcripts = model.transcribe(batch.features, batch.segments, beam=beam)
        return [(tokenizer.decode(labels), log_probability) for labels, log_probability in transcripts]
    sources = SourceBatch(batch.features, batch.segments)
    decoding = decoding_from_options(beam=beam)
    rows = answer_sources(model, sources, tokenizer=(tokenizer, tokenizer), decoding=decoding).rows
    return [(row[0].text or "", row[0].score or 0.0) for row in rows]
