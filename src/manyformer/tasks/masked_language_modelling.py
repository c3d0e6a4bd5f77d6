"""The task of predicting masked tokens."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Generator, Tensor

from manyformer.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.models import EncoderModel, MaskedLM
from manyformer.tasks.encoder_task import (
    ENCODER_HEADS,
    HEAD_KEYWORDS,
    EncoderHeadSettings,
    EncoderTask,
    head_for,
    head_named_in,
    import_head,
)
from manyformer.tasks.likelihood import likelihood, token_scores
from manyformer.tasks.requests import EncodedText, EvaluationRequest, EvaluationResult, TextPass
from manyformer.tasks.task import Inputs, Task, text_pass
from manyformer.tasks.toy import SYMBOLS, Toy, ToyDraw

MASKED_SHARE = 0.15
MASK_ID = 4


@final
class MaskedLanguageModelling(EncoderTask[MaskedLM]):
    """Predicts the tokens of a text that are masked; on other data its recipes have the head of another task."""

    name = "masked-lm"
    title = "masked language modelling"
    model = MaskedLM
    data_forms: Mapping[str, str] = {"text": "masked"}
    has_labels = False
    recipe_keywords = HEAD_KEYWORDS

    def batch(self, model: MaskedLM, inputs: Inputs, targets: Tensor) -> MaskedLMBatch:
        return MaskedLMBatch(inputs.tokens, targets, inputs.segments)

    def random_targets(self, model: MaskedLM, inputs: Inputs, generator: Generator) -> Tensor:
        return inputs.tokens.masked_fill(~_draw_masked(inputs.tokens, generator), IGNORE_INDEX)

    def toy(self, model: MaskedLM, draw: ToyDraw) -> Toy:
        """Rows that repeat four random symbols, of which some are masked."""
        tokens = draw.repeated()
        masked = _draw_masked(tokens, draw.generator)
        batch = MaskedLMBatch(tokens.masked_fill(masked, MASK_ID), tokens.masked_fill(~masked, IGNORE_INDEX))
        return Toy(batch, math.log(SYMBOLS))

    def evaluate(self, request: EvaluationRequest[MaskedLM]) -> EvaluationResult:
        """Perplexity and accuracy of the masked tokens."""
        sums = likelihood(request)
        return EvaluationResult(token_scores(sums), f"{sums.targets:,} hidden tokens, the same in every evaluation")

    def variant(self, data_kind: str) -> Task[Any]:
        return head_for(data_kind) or self

    def built_with(self, keywords: Mapping[str, Any]) -> Task[Any]:
        import_head(keywords)
        return head_named_in(keywords) or self

    def data_kinds(self) -> tuple[str, ...]:
        heads = sorted(ENCODER_HEADS.values(), key=lambda task: task is not self)
        return tuple(dict.fromkeys(kind for task in heads for kind in task.data_forms))

    def with_head(self, encoder: EncoderModel, settings: EncoderHeadSettings) -> MaskedLM:
        assert isinstance(encoder, MaskedLM)
        return encoder

    def text_passes(self, model: MaskedLM, text: EncodedText) -> list[TextPass]:
        return [text_pass(self, model, [text.tokenizer.bos, *text.ids, text.tokenizer.eos], text)]


def _draw_masked(tokens: Tensor, generator: Generator) -> Tensor:
    masked = torch.rand(tokens.shape, generator=generator) < MASKED_SHARE
    # without a masked token there would be no loss
    masked[:, 0] = True
    return masked.to(tokens.device)


MASKED_LM = MaskedLanguageModelling()
