"""The common part of the tasks of a bidirectional encoder of tokens."""

from collections.abc import Mapping
from typing import Any

from typing_extensions import TypeVar

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


class EncoderTask(Task[E]):
    """Reads one sequence as a whole."""

    reasons: Mapping[str, str] = BIDIRECTIONAL

    def token_ids(self, model: E) -> int:
        return model.embed.vocab

    def arguments(self, model: E, inputs: Inputs) -> tuple[Any, ...]:
        return inputs.tokens, inputs.segments
