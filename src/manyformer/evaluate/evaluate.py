"""`evaluate`: from a run's folder to the scores that fit its task."""

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
from manyformer.evaluate.eval_data import file_of, split_of
from manyformer.evaluate.tasks import Ask, EvaluationSettings
from manyformer.models import Model
from manyformer.recipes import get_recipe
from manyformer.scores import ScoreRecord
from manyformer.train.run_folder import as_run


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on `material` (a split or a file), and in words how they were obtained."""

    task: str
    material: str
    scores: tuple[ScoreRecord, ...]
    how: str

    def __getitem__(self, name: str) -> ScoreRecord:
        """The score of that name. Raises KeyError where the task has no such score."""
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
    each: Callable[[float], None] = lambda share: None,
) -> Evaluation:
    """Score the final model of the run in the folder `run`.

    `split` is "test" or "valid", by default test where the run has one; `data` is any file in the form that the run
    learned from, or two parallel files. `keywords` change what is no weight, as for `load`. `device` None takes a GPU
    where there is one. `wrap` makes of the model what is scored. `each` is told how much is done, 0 to 1. Raises
    UserError.
    """
    folder = Path(run)
    if split is not None and data is not None:
        raise UserError("give either a split or data to score, not both")
    if not (folder / RUN_FILE).is_file():
        raise UserError(f"{run} is no run's folder: {RUN_FILE} is missing, which says how to read data")
    model = wrap(load(folder, keywords=keywords).to(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    record = as_run(folder)
    task = get_recipe(record.recipe).card.task
    tokenizers = load_tokenizers(folder / "model")
    with tempfile.TemporaryDirectory(prefix="manyformer-") as room, torch.inference_mode():
        if data is None:
            material = split_of(record, task, folder, split)
        else:
            material = file_of(record, task, tokenizers, data, Path(room))
        ask = Ask(model, tokenizers, record, material, EvaluationSettings() if settings is None else settings, each)
        scores, how = tasks.TASKS[task](ask)
    return Evaluation(task, material.name, tuple(scores), how)
