"""The head of an encoder as keywords of every recipe of masked language modelling."""

import inspect
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from manyformer.errors import UserError
from manyformer.models import EncoderModel
from manyformer.recipes.keywords import PositiveSize
from manyformer.tasks import Task
from manyformer.tasks.encoder_task import ENCODER_HEADS, EncoderHeadSettings, EncoderTask
from manyformer.tasks.masked_language_modelling import MASKED_LM

HEAD, CLASSES, POOLER_ACTIVATION = "head", "classes", "pooler_activation"

HeadKeyword = Annotated[str, ENCODER_HEADS, "task that the head is for; the kind of data decides it in a run"]
HeadClasses = Annotated[
    PositiveSize | None, "number of labels of a head that has labels, null for others; the data decides it in a run"
]

PoolerActivation = Annotated[
    Literal["tanh", "relu", "gelu", "gelu-tanh"], "activation of the dense layer of a head for labels of texts"
]


class EncoderHead(NamedTuple):
    """The task of a head, its number of labels, None for a head without labels, and its activation."""

    task: EncoderTask
    classes: int | None
    pooler_activation: str

    @classmethod
    def taken_from(cls, keywords: dict[str, Any]) -> "EncoderHead":
        """Remove its keywords and return the head. Raises UserError for a missing or needless one."""
        head = cls(ENCODER_HEADS[keywords.pop(HEAD)], keywords.pop(CLASSES), keywords.pop(POOLER_ACTIVATION))
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


def with_head_keywords(signature: inspect.Signature) -> inspect.Signature:
    """The signature of a recipe of masked language modelling with the keywords of its head."""
    head = inspect.Parameter(HEAD, inspect.Parameter.KEYWORD_ONLY, default=MASKED_LM.name, annotation=HeadKeyword)
    classes = inspect.Parameter(CLASSES, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HeadClasses)
    activation = inspect.Parameter(
        POOLER_ACTIVATION, inspect.Parameter.KEYWORD_ONLY, default="tanh", annotation=PoolerActivation
    )
    return signature.replace(parameters=[*signature.parameters.values(), head, classes, activation])


def head_named_in(keywords: Mapping[str, Any]) -> EncoderTask | None:
    """The task of the head that the keywords of a recipe name; None for a recipe without the keyword."""
    return ENCODER_HEADS.get(keywords.get(HEAD, ""))


def expected_head(task: Task) -> dict[str, Any]:
    """The keywords of the head of a task before the data is read, as if there were two labels."""
    has_labels = isinstance(task, EncoderTask) and task.has_labels
    return {HEAD: task.name} | ({CLASSES: 2} if has_labels else {})
