"""Tasks: what models are for. Each module that ends in an instance of `Task` adds one; `register` adds others."""

from manyformer.tasks.model_passes import EncodedText, ImagePass, TextPass
from manyformer.tasks.registry import TASKS, register, task_named, task_of_class
from manyformer.tasks.requests import (
    EvaluationRequest,
    EvaluationResult,
    EvaluationSettings,
    Prediction,
    PredictionRequest,
)
from manyformer.tasks.score_sums import ScoreSums
from manyformer.tasks.task import Inputs, Task
from manyformer.tasks.toy import Toy, ToyDraw

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
