"""The tasks of a bidirectional encoder of tokens: what they have in common, its heads, and filling in masked tokens."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Generator, Tensor
from typing_extensions import TypeVar

from manyformer.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.kernels import named_kernels
from manyformer.models import EncoderModel, MaskedLM
from manyformer.tasks.requests import EncodedText, EvaluationRequest, EvaluationResult, TextPass
from manyformer.tasks.task import Inputs, Task, likelihood, text_pass, token_scores
from manyformer.tasks.toy import SYMBOLS, Toy, ToyDraw

E = TypeVar("E", bound=EncoderModel, default=Any)
"""The encoder class of a task."""
BIDIRECTIONAL = {
    "causal": "every token attends to both sides",
    "incremental_decoding": "a later token changes all earlier outputs, so no state can be cached",
    "cross_attention": "it reads one sequence only",
}
"""Promises that a bidirectional encoder cannot make, with the reasons."""
MASKED_SHARE = 0.15
MASK_ID = 4


class EncoderHeadSettings(NamedTuple):
    """The number of labels of a head, 0 if it has none, and the activation of its dense layer, if it has one."""

    classes: int = 0
    pooler_activation: str = "tanh"


class EncoderTask(Task[E]):
    """Reads one sequence as a whole; `has_labels` is whether its head has an output for each label of the data.

    `has_pooler` is whether the head has a dense layer with an activation of choice."""

    reasons: Mapping[str, str] = BIDIRECTIONAL
    has_labels: bool = True
    has_pooler: bool = False

    def token_ids(self, model: E) -> int:
        return model.embed.vocab

    def arguments(self, model: E, inputs: Inputs) -> tuple[Any, ...]:
        return inputs.tokens, inputs.segments

    def model_reasons(self, model: E) -> Mapping[str, str]:
        # a promise of all encoders, but for kernels that attend fully to short rows
        if not any(kernel.switches_by_length for kernel in named_kernels(model).values()):
            return {}
        reason = "the length of a row, with its padding and all its documents, decides whether its attention is full"
        return {"padding_invariant": reason, "packing": reason}

    @abstractmethod
    def with_head(self, encoder: EncoderModel, settings: EncoderHeadSettings) -> E:
        """The embedding and the body of an encoder with a new head of this task."""


ENCODER_HEADS: dict[str, EncoderTask] = {}
"""All tasks of encoders by name; every recipe of masked language modelling has a head for each of them."""


def head_for(data_kind: str) -> EncoderTask | None:
    """The task whose head learns from data of this kind."""
    return next((task for task in ENCODER_HEADS.values() if data_kind in task.data_forms), None)


@final
class MaskedLanguageModelling(EncoderTask[MaskedLM]):
    """Predicts the tokens of a text that are masked; on other data its recipes have the head of another task."""

    name = "masked-lm"
    title = "masked language modelling"
    model = MaskedLM
    data_forms: Mapping[str, str] = {"text": "masked"}
    has_labels = False

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

    def data_kinds(self) -> tuple[str, ...]:
        # the own kinds of data first: the first one is the default
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
