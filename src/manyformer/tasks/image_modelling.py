"""The task of generating images one value after another."""

from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import NDArray

from manyformer.errors import UserError
from manyformer.models import LanguageModel
from manyformer.scores import ScoreKind, bits_per_dimension
from manyformer.tasks.causal_task import WORK_SCORES, CausalTask
from manyformer.tasks.likelihood import likelihood, token_scores
from manyformer.tasks.model_passes import ImagePass, TextPass
from manyformer.tasks.requests import EvaluationRequest, EvaluationResult
from manyformer.tasks.task import token_row
from manyformer.tasks.tokenizer_protocols import ImageTokenizer


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

    def image_pass(self, model: LanguageModel, image: NDArray[np.uint8], tokenizer: ImageTokenizer | None) -> ImagePass:
        """Each token is the value of one channel of a pixel; the token before all others covers none."""
        if tokenizer is None:
            raise UserError("the model was saved without a tokenizer, so it cannot read images")
        _, width, channels = image.shape
        tokens = token_row(model, [tokenizer.bos, *tokenizer.tokens(image)[:-1]], model.embed.vocab)
        places = [divmod(int(index) // channels, width) for index in tokenizer.order[:-1]]
        labels = ("start", *(f"{row}, {column}" for row, column in places))
        run = TextPass(lambda watch: model(tokens, watch=watch), labels, len(labels))
        return ImagePass(run, (None, *places), 1)


IMAGE_GENERATION = ImageGeneration()
