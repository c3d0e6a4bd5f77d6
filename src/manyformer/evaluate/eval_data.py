"""Evaluation data: a split that the run held out, or any file, tokenized as the training data."""

from pathlib import Path

from manyformer.config import RunConfig
from manyformer.data import TokenizerPair
from manyformer.data.kind import OpenRequest
from manyformer.data.opened import EvaluationData, EvaluationPath
from manyformer.data.opening import open_file, open_held_out
from manyformer.recipes import get_recipe
from manyformer.tasks import Task


def load_split(run: RunConfig, folder: Path, split: str | None) -> EvaluationData:
    """Load a held-out split of the run in `folder`: `split`, by default test if the run has one, else valid."""
    request = OpenRequest(run.batch.tokens, folder / "data", run.seed)
    return open_held_out(run.data, data_form(run), request, split)


def load_file(run: RunConfig, tokenizers: TokenizerPair, path: EvaluationPath, scratch_dir: Path) -> EvaluationData:
    """Load other data of the run's kind; `scratch_dir` is a folder for shards. Raises UserError for bad data."""
    return open_file(run.data, data_form(run), tokenizers, path, OpenRequest(run.batch.tokens, scratch_dir))


def task_of_run(run: RunConfig) -> Task:
    """The task of the run's recipe on the run's kind of data."""
    return get_recipe(run.recipe).card.task.variant(run.data.kind)


def data_form(run: RunConfig) -> str:
    """The form in which the task of the run's recipe reads its data."""
    return task_of_run(run).data_forms[run.data.kind]
