"""Evaluation of trained models: `evaluate(run)` computes the scores of its task, `predict(run, file)` labels inputs.

`held_images(run, count)` are held-out images.
"""

from manyformer.inference.evaluate.eval_data import held_images
from manyformer.inference.evaluate.evaluate import Evaluation, evaluate
from manyformer.inference.evaluate.predict import PredictedInput, predict
from manyformer.models.tasks import EvaluationSettings

__all__ = ["Evaluation", "EvaluationSettings", "PredictedInput", "evaluate", "held_images", "predict"]
