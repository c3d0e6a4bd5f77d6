"""What trained models say about files, input by input: labels, captions of images, and transcripts of recordings."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.base.errors import UserError
from manyformer.base.system import temporary_folder
from manyformer.base.type_aliases import LogFn
from manyformer.data.images.image_files import open_image_files
from manyformer.data.images.image_reading import CHANGES, ImageRecord, ImageResize, count_changes
from manyformer.data.pipeline.kind import OpenRequest, kind_of, no_log
from manyformer.data.pipeline.opened import UnlabelledData, UnlabelledInput
from manyformer.data.pipeline.summary import ChangeCounts
from manyformer.inference.evaluate.eval_data import TrainedRun, open_run, open_run_or_model, task_of_run
from manyformer.inference.generate import Decoding, Hypothesis, SourceBatch, answer_sources, decoding_from_options
from manyformer.models.tasks import Prediction, PredictionRequest
from manyformer.nn.batches import to_device
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.runtime.devices import SMALLER_WORK, report_missing_operator, report_out_of_memory

IMAGES_PER_BATCH = 32


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
        raise _other_task(trained, run, "predicts no labels")
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
        # strict: an input without its labels would shift those of all that follow
        for item, prediction in zip(data.inputs, task.predict(request), strict=True):
            yield PredictedInput(item, prediction)


class ImageCaption(NamedTuple):
    """The location of an image, and the captions that were found for it, the best first."""

    location: str
    captions: tuple[Hypothesis, ...]


def caption_images(
    run: str | Path, path: str, decoding: Decoding, *, device: str | None = None, log: LogFn = no_log
) -> Iterator[ImageCaption]:
    """Yield the captions of the images at `path`, in order, by the final model of the run.

    `path` is an image file, a folder, or an archive or IDX file of images; square images are resized to the model's
    size. `device` None selects a GPU if there is one. `log` receives at the end what was changed in images. Raises
    UserError for another run and for a bad file.
    """
    trained = open_run(run)
    task = task_of_run(trained.config)
    if task.command != "caption":
        raise _other_task(trained, run, "captions no images")
    model: Any = trained.load_model(device)
    changes = ChangeCounts()
    records = _image_records(path, model.embed_source.shape, changes)
    tokenizers = (trained.tokenizers.source, trained.tokenizers.target)
    with report_out_of_memory(f"in the captions of {path}", SMALLER_WORK):
        # a folder may hold more images than memory does
        while batch := list(islice(records, IMAGES_PER_BATCH)):
            images = torch.from_numpy(np.stack([record.pixels for record in batch]))
            answers = answer_sources(model, SourceBatch(images, None), tokenizer=tokenizers, decoding=decoding).rows
            for record, captions in zip(batch, answers, strict=True):
                yield ImageCaption(record.location, captions)
    for finding in changes.findings("image", CHANGES):
        log(str(finding))


def _image_records(path: str, shape: tuple[int, int, int], changes: ChangeCounts) -> Iterator[ImageRecord]:
    """The images at `path` in the model's shape, whose changes are counted.

    Raises UserError for one that cannot have it."""
    height, width, channels = shape
    for source in open_image_files(path).values():
        for record in source.images():
            # only squares are resized: others would be distorted or cut, and which is right nobody has said
            is_square = record.pixels.shape[0] == record.pixels.shape[1] and height == width
            resized = ImageResize(height if is_square else None, channels).apply(record)
            if resized.pixels.shape != shape:
                actual = " x ".join(map(str, record.pixels.shape[:2]))
                raise UserError(f"{record.location}: this image is {actual}, and the model reads {height} x {width}")
            count_changes(changes, resized)
            yield resized


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
                # lazily, one batch after the other, so that transcripts come while further recordings are read
                batches = (to_device(batch, model.device) for batch in data.batches or ())
                written = (row for batch in batches for row in _write(trained, model, batch, beam))
                for item, (text, log_probability) in zip(data.inputs, written, strict=True):
                    yield Transcript(item.name, text, log_probability)


def open_transcriber(run: str | Path) -> TrainedRun:
    """The run in a folder. Raises UserError unless its model transcribes recordings."""
    trained = open_run(run)
    task = task_of_run(trained.config)
    if task.command != "transcribe" or kind_of(trained.config.data).unlabelled is None:
        raise _other_task(trained, run, "transcribes no recordings")
    return trained


def first_recording(trained: TrainedRun, path: str) -> Float[Tensor, "1 f m"]:
    """The frames of the first recording at `path`, without padding. Raises UserError for a bad file."""
    with temporary_folder() as scratch_dir:
        data = _read_recordings(trained, path, scratch_dir)
        batch: Any = next(iter(data.batches or ()))
        frames: Tensor = batch.features[:1]
        if batch.segments is None:
            return frames
        # other recordings of the batch may be longer
        return frames[:, batch.segments[0] != PADDING_SEGMENT]


def _read_recordings(trained: TrainedRun, path: str, scratch_dir: Path) -> UnlabelledData:
    read_inputs = kind_of(trained.config.data).unlabelled
    assert read_inputs is not None
    request = OpenRequest(trained.config.batch.tokens, scratch_dir)
    return read_inputs(trained.config.data, trained.tokenizers, path, request)


def _write(trained: TrainedRun, model: Any, batch: Any, beam: int) -> list[tuple[str, float]]:
    """The text of each recording of a batch and its log-probability."""
    tokenizer = trained.tokenizers.target
    # a model with CTC alone has no decoder, and searches over prefixes itself
    if task_of_run(trained.config).generates is None:
        transcripts = model.transcribe(batch.features, batch.segments, beam=beam)
        return [(tokenizer.decode(labels), log_probability) for labels, log_probability in transcripts]
    sources = SourceBatch(batch.features, batch.segments)
    decoding = decoding_from_options(beam=beam)
    rows = answer_sources(model, sources, tokenizer=(tokenizer, tokenizer), decoding=decoding).rows
    return [(row[0].text or "", row[0].score or 0.0) for row in rows]


def _other_task(trained: TrainedRun, run: str | Path, lacking: str) -> UserError:
    """The error about a run whose model is for something else, which names the command for it."""
    task = task_of_run(trained.config)
    return UserError(
        f"the run in {run} ({trained.config.recipe}) {lacking}, it is for {task.title}; "
        f"use `manyformer {task.command} {run}`"
    )
