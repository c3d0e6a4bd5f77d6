"""The common part of the tasks of a bidirectional encoder of tokens, and the heads that such an encoder may have."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

from typing_extensions import TypeVar

from manyformer.kernels import named_kernels
from manyformer.models import EncoderModel
from manyformer.tasks.task import Inputs, Task

E = TypeVar("E", bound=EncoderModel, default=Any)
"""The encoder class of a task."""

BIDIRECTIONAL = {
    "causal": "every token attends to both sides",
    "incremental_decoding": "a later token changes all earlier outputs, so no state can be cached",
    "cross_attention": "it reads one sequence only",
}
"""Promises that a bidirectional encoder cannot make, with the reasons."""


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
