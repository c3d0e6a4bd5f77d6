"""The tasks of a language model: to predict each next token of a text, or each next value of an image."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from torch import Generator, Tensor

from manyformer.base.errors import UserError
from manyformer.models import LanguageModel, ModelOutput
from manyformer.models.scores import ScoreKind, bits_per_byte, bits_per_character, bits_per_dimension
from manyformer.models.tasks.requests import (
    EncodedText,
    EvaluationRequest,
    EvaluationResult,
    ImagePass,
    ImageTokenizer,
    TextPass,
)
from manyformer.models.tasks.task import Task, likelihood, row_accuracy, text_pass, token_row, token_scores
from manyformer.models.tasks.toy import PERIOD, SYMBOLS, Toy, ToyDraw
from manyformer.nn.batches import IGNORE_INDEX, CausalLMBatch
from manyformer.nn.core import State, WatchFn, no_watch
from manyformer.nn.model_inputs import Inputs

WORK_SCORES = {"steps": ScoreKind(lower_is_better=True), "span": ScoreKind("tokens", lower_is_better=True, digits=1)}
"""The mean number of steps (or layers) per scored token, and the mean span of all heads, if the model has them."""
STDLIB_PROMPT = "def "
SYNTHETIC_PROMPT = "ab"
TEXT_PROMPT = "The "


class CausalTask(Task[LanguageModel]):
    """Predicts each next token of one sequence."""

    model = LanguageModel
    command = "generate"
    measured_anyway = frozenset({"causal", "causal-gradient", "length"})

    def token_ids(self, model: LanguageModel) -> int:
        return model.embed.vocab

    def arguments(self, model: LanguageModel, inputs: Inputs) -> tuple[Any, ...]:
        return inputs.tokens, inputs.segments

    def call(
        self, model: LanguageModel, inputs: Inputs, state: State = None, *, watch: WatchFn = no_watch
    ) -> ModelOutput:
        output: ModelOutput = model(inputs.tokens, inputs.segments, state, watch=watch)
        return output

    def init_state(self, model: LanguageModel, inputs: Inputs, *, capacity: int | None = None) -> State:
        return model.init_state(inputs.tokens.shape[0], capacity=capacity)

    def batch(self, model: LanguageModel, inputs: Inputs, targets: Tensor) -> CausalLMBatch:
        return CausalLMBatch(inputs.tokens, targets, inputs.segments)

    def random_targets(self, model: LanguageModel, inputs: Inputs, generator: Generator) -> Tensor:
        return inputs.tokens.roll(-1, 1)

    def toy(self, model: LanguageModel, draw: ToyDraw) -> Toy:
        """Rows that repeat four random symbols; those of the first period cannot be predicted."""
        tokens = draw.repeated()
        targets = tokens.roll(-1, dims=1)
        # the first period cannot be known, and nothing follows the last token
        targets[:, : PERIOD - 1] = IGNORE_INDEX
        targets[:, -1] = IGNORE_INDEX
        return Toy(CausalLMBatch(tokens, targets), math.log(SYMBOLS))


@final
class LanguageModelling(CausalTask):
    """Predicts each next token of a text."""

    name = "language-model"
    title = "language modelling"
    data_forms: Mapping[str, str] = {"text": "next-token", "synthetic": "next-token", "images": "levels"}
    reasons: Mapping[str, str] = {"cross_attention": "a language model reads one sequence only"}
    score_kinds: Mapping[str, ScoreKind] = {
        "bits_per_character": ScoreKind(lower_is_better=True, digits=4),
        "exact_match": ScoreKind("%"),
        **WORK_SCORES,
    }
    generates = "continuation"

    def evaluate(self, request: EvaluationRequest[LanguageModel]) -> EvaluationResult:
        """Perplexity, bits per character and byte, token accuracy; each token is predicted once.

        For rows of a rule also exact match: the rows without a wrong token.

        The signatures tell how the text was cut, which decides the context of each token.
        """
        sums = likelihood(request)
        assert request.batches is not None
        units = request.batches.units
        assert units is not None
        token_perplexity, accuracy = token_scores(sums)
        scores = [
            token_perplexity,
            bits_per_character(sums.nats, units.characters),
            bits_per_byte(sums.nats, units.bytes),
            accuracy,
        ]
        # a row of a rule is a question of its own; one of a text ends anywhere
        if getattr(request.section, "kind", "") == "synthetic" and not request.batches.rows_continue:
            scores.append(row_accuracy(request))
        reading, cut = describe_reading(request)
        scores = [replace(score, signature="|".join([score.signature, *_pairs(reading)])) for score in scores]
        return EvaluationResult(scores, f"{sums.targets:,} tokens {cut}", reading)

    def text_passes(self, model: LanguageModel, text: EncodedText) -> list[TextPass]:
        return [text_pass(self, model, [text.tokenizer.bos, *text.ids], text)]

    def next_commands(self, run: Path, data: object) -> tuple[str, ...]:
        prompt = {"stdlib": STDLIB_PROMPT, None: SYNTHETIC_PROMPT}.get(getattr(data, "path", None), TEXT_PROMPT)
        # the most probable text soon repeats itself, the most probable answer to a rule is the right one
        sampling = "" if prompt == SYNTHETIC_PROMPT else " --temperature 0.8"
        return f'manyformer generate {run} "{prompt}"{sampling}', f'manyformer view {run} "{prompt}"'

    def variant(self, data_kind: str) -> Task[LanguageModel]:
        if data_kind == "images":
            return IMAGE_GENERATION
        return self


def describe_reading(request: EvaluationRequest[LanguageModel]) -> tuple[Mapping[str, int], str]:
    """The numbers of how the text was cut, for signatures, and a description."""
    assert request.batches is not None
    # the context of a token decides its loss, so signatures differ where texts are cut differently
    if request.windows is not None:
        context, stride = request.windows
        cut = f"in windows of {context}, {stride} apart: each is predicted from {context - stride + 1} tokens at least"
        return request.windows._asdict(), f"{cut}, or from all of its document before it"
    cut = f"in rows of {request.row_length}"
    if not request.batches.rows_continue:
        return {}, cut
    # where the lanes of continuing rows begin, the context does
    lanes = len(next(iter(request.batches))[0])
    return {"lanes": lanes}, f"{cut}, each continuing the row before it in one of {lanes} lanes"


def _pairs(reading: Mapping[str, int]) -> list[str]:
    return [f"{name}:{number}" for name, number in reading.items()]


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


LANGUAGE_MODELLING = LanguageModelling()
IMAGE_GENERATION = ImageGeneration()
