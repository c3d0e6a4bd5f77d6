"""Scoring a trained model: `evaluate(run)` gives the scores that fit its task, `tag(run, file)` a tagger's answers.

`held_images(run, count)` are images that it has not learned from.
"""

from manyformer.evaluate.held import Material
from manyformer.evaluate.painting import held_images
from manyformer.evaluate.tagging import Labelled, tag
from manyformer.evaluate.tasks import Settings
from manyformer.evaluate.verb import Evaluation, evaluate

__all__ = ["Evaluation", "Labelled", "Material", "Settings", "evaluate", "held_images", "tag"]
