"""Scoring a trained model: `evaluate(run)` gives the scores that fit its task, each with how it was computed."""

from manyformer.evaluate.held import Material
from manyformer.evaluate.tasks import Settings
from manyformer.evaluate.verb import Evaluation, evaluate

__all__ = ["Evaluation", "Material", "Settings", "evaluate"]
