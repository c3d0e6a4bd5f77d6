"""Evaluation of trained models: `evaluate(run)` computes the scores of its task, `predict(run, file)` labels inputs.

`held_images(run, count)` are held-out images.
"""

from typing import TYPE_CHECKING

from manyformer.base.lazy_names import offer_names as _offer_names

if TYPE_CHECKING:
    from manyformer.inference.evaluate.eval_data import held_images
    from manyformer.inference.evaluate.evaluate import Evaluation, evaluate
    from manyformer.inference.evaluate.predict import PredictedInput, predict
    from manyformer.models.tasks import EvaluationSettings

_MODULES = {
    "Evaluation": "manyformer.inference.evaluate.evaluate",
    "EvaluationSettings": "manyformer.models.tasks",
    "PredictedInput": "manyformer.inference.evaluate.predict",
    "evaluate": "manyformer.inference.evaluate.evaluate",
    "held_images": "manyformer.inference.evaluate.eval_data",
    "predict": "manyformer.inference.evaluate.predict",
}

__all__ = ["Evaluation", "EvaluationSettings", "PredictedInput", "evaluate", "held_images", "predict"]


_offer_names(__name__, _MODULES)
