"""Evaluation of trained models: `evaluate(run)` computes the scores of its task, `tag(run, file)` labels a treebank.

`held_images(run, count)` are held-out images.
"""

from manyformer.data.opened import EvaluationData
from manyformer.evaluate.evaluate import Evaluation, evaluate
from manyformer.evaluate.held_out_images import held_images
from manyformer.evaluate.tag_file import LabelledSentence, tag
from manyformer.tasks import EvaluationSettings

__all__ = ["Evaluation", "EvaluationData", "EvaluationSettings", "LabelledSentence", "evaluate", "held_images", "tag"]
