"""The head of an encoder as keywords of every recipe of masked language modelling."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

from manyformer.errors import UserError
from manyformer.models import EncoderModel
from manyformer.plugins import TASK_GROUP, import_entry_point
from manyformer.recipes.keywords import Default, PositiveSize, SharedKeywords
from manyformer.tasks import Task
from manyformer.tasks.masked_language_modelling import ENCODER_HEADS, MASKED_LM, EncoderHeadSettings, EncoderTask

HEAD = "head"
CLASSES = "classes"


class HeadOptions(TypedDict, total=False):
    """The head of an encoder."""

    head: Annotated[
        str, ENCODER_HEADS, "task that the head is for; the kind of data decides it in a run", Default(MASKED_LM.name)
    ]
    classes: Annotated[
        PositiveSize | None,
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


HEAD_KEYWORDS = SharedKeywords(
    HeadOptions, lambda signature, task: task is MASKED_LM, lambda options: EncoderHead.read(options).put_on
)


def import_head(keywords: Mapping[str, Any]) -> None:
    """Import the installed package that offers the head which the keywords of a saved model name, if there is one."""
    name = keywords.get(HEAD)
    if isinstance(name, str) and name not in ENCODER_HEADS:
        import_entry_point(TASK_GROUP, name)


def head_named_in(keywords: Mapping[str, Any]) -> EncoderTask | None:
    """The task of the head that the keywords of a recipe name; None for a recipe without the keyword."""
    return ENCODER_HEADS.get(keywords.get(HEAD, ""))


def expected_head(task: Task) -> dict[str, Any]:
    """The keywords of the head of a task before the data is read, as if there were two labels."""
    has_labels = isinstance(task, EncoderTask) and task.has_labels
    return {HEAD: task.name} | ({CLASSES: 2} if has_labels else {})
