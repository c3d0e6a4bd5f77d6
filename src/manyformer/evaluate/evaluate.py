"""`evaluate`: the scores of a trained run on held-out data or on a file."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from manyformer.api import load
from manyformer.config import RUN_FILE
from manyformer.data import load_tokenizers
from manyformer.errors import UserError
from manyformer.evaluate import tasks
from manyformer.evaluate.eval_data import load_file, load_split
from manyformer.evaluate.tasks import Ask
from manyformer.models import Model
from manyformer.recipes import get_recipe
from manyformer.scores import ScoreRecord
from manyformer.tasks import EvaluationSettings
from manyformer.train.run_folder import as_run


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on `data` (a split or a file); `how` describes how they were computed."""

    task: str
    data: str
    scores: tuple[ScoreRecord, ...]
    how: str

    def __getitem__(self, name: str) -> ScoreRecord:
        """The score with this name. Raises KeyError if the task has no such score."""
        for score in self.scores:
            if score.name == name:
                return score
        raise KeyError(name)


def evaluate(
    run: str | Path,
    *,
    split: str | None = None,
    data: str | Sequence[str] | None = None,
    settings: EvaluationSettings | None = None,
    keywords: Mapping[str, Any] | None = None,
    device: str | None = None,
    wrap: Callable[[Model], Model] = lambda model: model,
    on_progress: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Score the final model of the run in the folder `run`.

    `split` is "test" or "valid", by default test if the run has one; `data` is a file in the format of the training
    data, or two parallel files. `keywords` override recipe keywords that change no weights, as for `load`. `device`
    None selects a GPU if there is one. `wrap` replaces the model by the one to score. `on_progress` is called with the
    completed share, 0 to 1. Raises UserError.
    """
    folder = Path(run)
    if split is not None and data is not None:
        raise UserError("give either a split or data to score, not both")
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{run} is no run's folder: {RUN_FILE} is missing, which describes the data")
    model = wrap(load(folder, keywords=keywords).to(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    record = as_run(folder)
    task = get_recipe(record.recipe).card.task
    tokenizers = load_tokenizers(folder / "model")
    with tempfile.TemporaryDirectory(prefix="manyformer-") as scratch_dir, torch.inference_mode():
        if data is None:
            eval_data = load_split(record, folder, split)
        else:
            eval_data = load_file(record, tokenizers, data, Path(scratch_dir))
        request = Ask(
            model, tokenizers, record, eval_data, EvaluationSettings() if settings is None else settings, on_progress
        )
        scores, how = tasks.TASKS[task](request)
    return Evaluation(task, eval_data.name, tuple(scores), how)
