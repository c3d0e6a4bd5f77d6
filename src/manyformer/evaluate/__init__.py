"""Scoring a trained model: `evaluate(run)` gives the scores that fit its task, `tag(run, file)` a tagger's answers.

`held_images(run, count)` are images that it has not learned from.
"""

from manyformer.evaluate.eval_data import EvaluationData
from manyformer.evaluate.evaluate import Evaluation, evaluate
from manyformer.evaluate.held_out_images import held_images
from manyformer.evaluate.tag_file import LabelledSentence, tag
from manyformer.evaluate.tasks import EvaluationSettings

__all__ = ["Evaluation", "EvaluationData", "EvaluationSettings", "LabelledSentence", "evaluate", "held_images", "tag"]
