"""Tasks, what models are for, and their registry: modules with an instance of `Task` add one, as `register` does."""

import importlib
import pkgutil
from pathlib import Path
from typing import Any

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.plugins import TASK_GROUP, import_entry_point
from manyformer.models import Model
from manyformer.models.tasks.masked_language_modelling import ENCODER_HEADS, EncoderTask
from manyformer.models.tasks.requests import (
    EncodedText,
    EvaluationRequest,
    EvaluationResult,
    EvaluationSettings,
    ImagePass,
    Prediction,
    PredictionRequest,
    TextPass,
)
from manyformer.models.tasks.task import ScoreSums, Task
from manyformer.models.tasks.toy import Toy, ToyDraw
from manyformer.nn.model_inputs import Inputs

__all__ = [
    "TASKS",
    "EncodedText",
    "EvaluationRequest",
    "EvaluationResult",
    "EvaluationSettings",
    "ImagePass",
    "Inputs",
    "Prediction",
    "PredictionRequest",
    "ScoreSums",
    "Task",
    "TextPass",
    "Toy",
    "ToyDraw",
    "register",
    "task_named",
    "task_of_class",
]
TASKS: dict[str, Task] = {}


def register(task: Task) -> None:
    """Add a task. Raises UserError if another one has its name."""
    other = TASKS.setdefault(task.name, task)
    if other is not task:
        raise UserError(
            f"the task '{task.name}' of {type(task).__module__} exists already, in {type(other).__module__}: rename it"
        )
    if isinstance(task, EncoderTask):
        ENCODER_HEADS.setdefault(task.name, task)


def task_named(name: str) -> Task:
    """The task of that name, imported if an installed package offers it. Raises UserError with the nearest names."""
    if name not in TASKS:
        import_entry_point(TASK_GROUP, name)
    if name not in TASKS:
        raise UserError(f"there is no task '{name}'; {suggest_names(name, TASKS)}")
    return TASKS[name]


def task_of_class(model: Model) -> Task[Any]:
    """The task for models of this class that learns from the most kinds of data. Raises UserError if there is none.

    Among equals it is the task that reads and writes text: an encoder-decoder may also read images or sounds, which its
    class does not say."""
    tasks = [task for task in TASKS.values() if isinstance(model, task.model)]
    if tasks:
        return max(tasks, key=lambda task: (len(task.data_forms), task.generates == "answer"))
    raise UserError(f"no task is known for a {type(model).__name__}: build it by a recipe, or register a task")


def _register_modules() -> None:
    """Register the instances in the modules of this folder."""
    tasks: list[Task] = []
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        contents = vars(importlib.import_module(f"{__package__}.{module.name}"))
        tasks += [
            value
            for value in contents.values()
            # a module may import the instance of another one
            if isinstance(value, Task) and type(value).__module__.endswith(f".{module.name}")
        ]
    # messages list tasks in this order, which must not depend on the files that they stand in
    for task in sorted(tasks, key=lambda task: task.name):
        register(task)


_register_modules()
