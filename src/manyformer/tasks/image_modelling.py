"""The task of generating images one value after another."""

from collections.abc import Mapping
from typing import final

from manyformer.models import LanguageModel
from manyformer.scores import ScoreKind, bits_per_dimension
from manyformer.tasks.causal_task import WORK_SCORES, CausalTask
from manyformer.tasks.likelihood import likelihood, token_scores
from manyformer.tasks.task import EvaluationRequest, EvaluationResult


@final
class ImageGeneration(CausalTask):
    """Predicts each next value of an image."""

    name = "image-generation"
    title = "image generation"
    data_forms: Mapping[str, str] = {"images": "levels"}
    score_kinds: Mapping[str, ScoreKind] = {
        "bits_per_dimension": ScoreKind(lower_is_better=True, digits=4),
        **WORK_SCORES,
    }
    generates = "images"
    reasons: Mapping[str, str] = {"cross_attention": "it generates images unconditionally, without another sequence"}

    def evaluate(self, request: EvaluationRequest[LanguageModel]) -> EvaluationResult:
        """Bits per dimension, perplexity and accuracy of the values."""
        sums = likelihood(request)
        scores = [bits_per_dimension(sums.nats, sums.targets), *token_scores(sums)]
        return EvaluationResult(scores, f"{sums.targets:,} values of images")


IMAGE_GENERATION = ImageGeneration()
