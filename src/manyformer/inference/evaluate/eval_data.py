"""A trained run, and its evaluation data: a split that it held out, or any file, tokenized as the training data.

Of held-out data, single batches and images can be had for models to show what they attend to; a run in an environment
gives its policy."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from manyformer.base.context_windows import ContextWindows
from manyformer.base.environments import VectorEnvironment, make_environment
from manyformer.base.errors import UserError
from manyformer.base.files.verified_folder import VerifiedFolder
from manyformer.base.system import temporary_folder
from manyformer.base.type_aliases import ImageArray, LogFn
from manyformer.config import DATA_SECTIONS, RUN_FILE, EnvironmentData, ImagesData, ModalitiesData, RunConfig, TreesData
from manyformer.conversion import load
from manyformer.conversion.hugging_face.model_import import read_recipe, read_tokenizers
from manyformer.data import TokenizerPair, load_tokenizers, open_file, open_held_out
from manyformer.data.pipeline.kind import OpenRequest, kind_of, no_log
from manyformer.data.pipeline.opened import EvaluationData, EvaluationPath
from manyformer.data.tokenizers.pixel_tokenizer import PixelTokenizer
from manyformer.models import Model, PolicyModel
from manyformer.models.model_files import CONFIG_FILE
from manyformer.models.tasks import Task
from manyformer.models.tasks.masked_language_modelling import head_named_in
from manyformer.models.tasks.requests import TaskTokenizers
from manyformer.nn.batches import Batch, CausalLMBatch, ImageClassificationBatch, Seq2SeqBatch
from manyformer.nn.runtime.devices import best_device
from manyformer.recipes import Recipe, get_recipe
from manyformer.recipes.parts.registry import build_on_meta
from manyformer.training.run_folder import as_run

DEFAULT_ROW = 512
MAX_ROW = 4096
"""Tokens in a row for a model alone: where it allows any number, and at most."""


class TrainedRun(NamedTuple):
    """A run that was trained: its folder, its settings, and the tokenizers of its final model.

    A model that is saved alone is a run that `holds_data` no more: files can be read for it."""

    folder: Path
    config: RunConfig
    tokenizers: TokenizerPair
    holds_data: bool = True

    def load_model(self, device: str | None, keywords: Mapping[str, Any] | None = None) -> Model:
        """The final model with other `keywords`, on `device` or, for None, on a GPU if there is one."""
        return load(self.folder, keywords=keywords).to(device or best_device())

    @contextmanager
    def open_data(
        self,
        split: str | None,
        path: EvaluationPath | None,
        *,
        windows: ContextWindows | None = None,
        log: LogFn = no_log,
    ) -> Iterator[EvaluationData]:
        """The data in the file `path`, or else the held-out `split`; shards of a file are removed on exit.

        Text is cut to `windows`, or to rows as in training. `log` receives a line for each change of what is in the
        file. Raises UserError for windows over other data than the text of a language model."""
        if windows is not None and data_form(self.config) not in kind_of(self.config.data).windowed_forms:
            raise UserError(
                f"a context is for language models of text; {self.folder} is a run of {self.config.recipe} on data of "
                f"kind {self.config.data.kind}"
            )
        if path is None:
            yield self.load_split(split, windows=windows)
            return
        with temporary_folder() as scratch_dir:
            request = OpenRequest(self.config.batch.tokens, scratch_dir, log=log, windows=windows)
            yield open_file(self.config.data, data_form(self.config), self.tokenizers, path, request)

    def load_split(self, split: str | None, *, windows: ContextWindows | None = None) -> EvaluationData:
        """Load a held-out split of the run: `split`, by default test if the run has one, else valid.

        Raises UserError for a model without the data that it was trained on."""
        if not self.holds_data:
            raise UserError(f"{self.folder} holds a model without the data of a run: give a file, as with --data FILE")
        run = self.config
        cache = self.folder / "data"
        request = OpenRequest(
            run.batch.tokens, cache, run.seed, belongs_to_model=True, tokenizers=self.tokenizers, windows=windows
        )
        return open_held_out(run.data, data_form(run), request, split)


def open_run(run: str | Path) -> TrainedRun:
    """The trained run in the folder `run`. Raises UserError if the folder holds none."""
    folder = Path(run)
    if not (folder / RUN_FILE).is_file():
        if (folder / CONFIG_FILE).is_file():
            raise UserError(f"{run} holds a model, and this needs a run with its data: {RUN_FILE} is missing there")
        raise UserError(f"{run} is not the folder of a run: {RUN_FILE} is missing, which describes the data")
    if not (folder / "model").is_dir():
        raise UserError(f"the run {run} has no final model yet: repeat its train command to continue it")
    # that of the final model, not of the folder: the run may have been continued with other settings since
    settings = VerifiedFolder.open(folder / "model").file(RUN_FILE)
    return TrainedRun(folder, as_run(settings), load_tokenizers(folder / "model"))


def open_run_or_model(folder: str | Path) -> TrainedRun:
    """The trained run in a folder, or the model that is saved or was imported there, or is one of `transformers`.

    Such a model reads files as the default settings of its kind of data say, in rows as long as it allows. Raises
    UserError for a folder with neither, and for a model without a tokenizer."""
    path = Path(folder)
    # also for a folder with neither, about which `open_run` says what is missing
    if (path / RUN_FILE).is_file() or not (path / CONFIG_FILE).is_file():
        return open_run(path)
    recipe, keywords = read_recipe(path)
    settings = {"recipe": recipe.card.name, "data": _assumed_data(path, recipe, keywords)}
    config = RunConfig.model_validate(settings)
    # at least one row of the data must fit into a batch
    batch = config.batch.model_copy(update={"tokens": max(config.batch.tokens, config.data.row_length)})
    return TrainedRun(path, config.model_copy(update={"batch": batch}), read_tokenizers(path), holds_data=False)


def _assumed_data(folder: Path, recipe: Recipe, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of data that the model in a folder reads: those of the first kind of its task, with its lengths."""
    kind = next(iter((head_named_in(keywords) or recipe.card.task).data_forms))
    fields = DATA_SECTIONS[kind].model_fields
    # without weights: only what the recipe makes of its keywords is asked
    max_length = build_on_meta(recipe.card.name, dict(keywords)).max_length or DEFAULT_ROW
    values = {
        "path": str(folder),
        "tokenizer_of": str(folder),
        "length": min(max_length, MAX_ROW),
        "max_length": min(max_length, MAX_ROW),
        # labels of words that are no relations
        "label": "xpos" if kind == TreesData.model_fields["kind"].default else None,
        "size": keywords.get("height") if keywords.get("height") == keywords.get("width") else None,
        "channels": keywords.get("channels"),
    }
    # each kind of data has some of these settings only
    return {"kind": kind, **{name: value for name, value in values.items() if name in fields and value is not None}}


def task_of_run(run: RunConfig) -> Task:
    """The task of the run's recipe on the run's kind of data."""
    return get_recipe(run.recipe).card.task.variant(run.data.kind)


def data_form(run: RunConfig) -> str:
    """The form in which the task of the run's recipe reads its data."""
    return task_of_run(run).data_forms[kind_of(run.data).name]


def held_batch(run: str | Path, *, data: str | None = None) -> tuple[Batch, TaskTokenizers]:
    """The first batch of the test data of the run, or of its validation data, and its tokenizers.

    `data` is another file, in any format of training data. Raises UserError."""
    trained = open_run_or_model(run)
    with trained.open_data(None, data) as held_out:
        assert held_out.batches is not None
        return next(iter(held_out.batches)), trained.tokenizers


def held_images(run: str | Path, count: int, *, data: str | None = None, log: LogFn = no_log) -> ImageArray:
    """The first `count` images (n, h, w, c) of the shuffled test data of the run, or of its validation data.

    `data` are other images, in any format of training data; `log` receives what was changed in them. The order is
    always the same. Raises UserError.
    """
    trained = open_run_or_model(run)
    if not isinstance(trained.config.data, ImagesData | ModalitiesData):
        raise UserError(f"the run in {run} ({trained.config.recipe}) was not trained on images")
    with trained.open_data(None, data, log=log) as held_out:
        assert held_out.batches is not None
        # lazily: only as many batches are read as hold the images asked for
        images = (image for batch in held_out.batches for image in _batch_images(batch, trained.tokenizers.source))
        return np.stack(list(islice(images, count)))


def _batch_images(batch: Batch, tokenizer: object) -> Iterator[ImageArray]:
    """The images of a batch, which has their pixels, or captions of them, or their tokens as targets."""
    if isinstance(batch, ImageClassificationBatch):
        yield from batch.pixels.numpy()
        return
    if isinstance(tokenizer, PixelTokenizer):
        assert isinstance(batch, CausalLMBatch | Seq2SeqBatch)
        for row in batch.targets:
            yield tokenizer.image(row)
        return
    assert isinstance(batch, Seq2SeqBatch)
    yield from batch.source.numpy()


class TrainedPolicy(NamedTuple):
    """The final model of a run, and the name and the options of its environment."""

    model: PolicyModel
    environment: str
    options: Mapping[str, Any]

    def make_environment(self, rows: int, *, drawn: bool = False) -> VectorEnvironment:
        """The environment with so many rows; with `drawn`, one that renders pictures where it can."""
        return make_environment(self.environment, rows, self.options, drawn=drawn)


def open_policy(run: str | Path, device: str | None) -> TrainedPolicy:
    """The policy that the run in a folder has trained, or that of one of its checkpoints.

    Raises UserError for a run of another task."""
    folder = Path(run).resolve()
    # of a checkpoint the weights are its own, the settings and the environment those of its run
    is_checkpoint = folder.parent.name == "checkpoints"
    trained = open_run(folder.parent.parent if is_checkpoint else run)
    data = trained.config.data
    if not isinstance(data, EnvironmentData):
        command = task_of_run(trained.config).command
        problem = f"{run} was trained on {data.kind}, not in an environment"
        raise UserError(f"{problem}; `manyformer {command}` uses its model")
    if is_checkpoint:
        trained = trained._replace(folder=folder)
    # what is trained in an environment is a policy
    model: Any = trained.load_model(device)
    return TrainedPolicy(model, data.environment, data.options)
