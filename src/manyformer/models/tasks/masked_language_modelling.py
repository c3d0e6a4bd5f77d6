"""The tasks of a bidirectional encoder of tokens: what they have in common, its heads, and filling in masked tokens."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, final

import torch
from annotated_types import Ge
from torch import Generator, Tensor
from typing_extensions import TypeVar

from manyformer.base.errors import UserError
from manyformer.base.keyword_checks import Default, SharedKeywords
from manyformer.base.plugins import TASK_GROUP, import_entry_point
from manyformer.models import EncoderModel, MaskedLM
from manyformer.models.tasks.requests import EncodedText, EvaluationRequest, EvaluationResult, TextPass
from manyformer.models.tasks.task import Task, likelihood, text_pass, token_scores
from manyformer.models.tasks.toy import SYMBOLS, Toy, ToyDraw
from manyformer.nn.batches import IGNORE_INDEX, MaskedLMBatch
from manyformer.nn.kernels.kernel import named_kernels
from manyformer.nn.model_inputs import Inputs

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


HEAD = "head"
CLASSES = "classes"


class HeadOptions(TypedDict, total=False):
    """The head of an encoder."""

    head: Annotated[
        str, ENCODER_HEADS, "task that the head is for; the kind of data decides it in a run", Default("masked-lm")
    ]
    classes: Annotated[
        Annotated[int, Ge(1)] | None,
        "number of labels of a head that has labels, null for others; the data decides it in a run",
        Default(None),
    ]
    pooler_activation: Annotated[
        Literal["tanh", "relu", "gelu", "gelu-tanh"],
        "activation of the dense layer of a head for labels of texts",
        Default("tanh"),
    ]


class EncoderHead(NamedTuple):
    """The task of a head, its number of labels, None for a head without labels, and its activation."""

    task: EncoderTask
    classes: int | None
    pooler_activation: str

    @classmethod
    def read(cls, options: dict[str, Any]) -> "EncoderHead":
        """The head that keywords describe. Raises UserError for a missing or needless one."""
        head = cls(ENCODER_HEADS[options[HEAD]], options[CLASSES], options["pooler_activation"])
        if head.task.has_labels and head.classes is None:
            raise UserError(f"head={head.task.name} needs classes, the number of labels")
        if not head.task.has_labels and head.classes is not None:
            raise UserError(f"head={head.task.name} has no labels, so classes ({head.classes}) must be left out")
        if head.pooler_activation != EncoderHeadSettings().pooler_activation and not head.task.has_pooler:
            raise UserError(
                f"head={head.task.name} has no dense layer, so pooler_activation ({head.pooler_activation}) must be "
                "left out"
            )
        return head

    def put_on(self, encoder: EncoderModel) -> EncoderModel:
        """The encoder with this head instead of its own."""
        settings = EncoderHeadSettings(self.classes or 0, self.pooler_activation)
        model: EncoderModel = self.task.with_head(encoder, settings)
        return model


HEAD_KEYWORDS = SharedKeywords(HeadOptions, lambda options: EncoderHead.read(options).put_on)
"""What every recipe of masked language modelling has besides its own keywords."""


def import_head(keywords: Mapping[str, Any]) -> None:
    """Import the installed package that offers the head which the keywords of a saved model name, if there is one."""
    name = keywords.get(HEAD)
    if isinstance(name, str) and name not in ENCODER_HEADS:
        import_entry_point(TASK_GROUP, name)


def head_named_in(keywords: Mapping[str, Any]) -> EncoderTask | None:
    """The task of the head that the keywords of a recipe name; None for a recipe without the keyword."""
    name = keywords.get(HEAD)
    # keywords of a saved model are not checked yet: a list has no hash
    if isinstance(name, str):
        return ENCODER_HEADS.get(name)
    return None


def expected_head(task: Task) -> dict[str, Any]:
    """The keywords of the head of a task before the data is read, as if there were two labels."""
    has_labels = isinstance(task, EncoderTask) and task.has_labels
    return {HEAD: task.name} | ({CLASSES: 2} if has_labels else {})


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
