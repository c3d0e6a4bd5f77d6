"""The config of this library's models in `transformers`."""

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from manyformer.errors import UserError
from manyformer.interop.auto_classes import MODEL_TYPE
from manyformer.models import Model
from manyformer.recipes import build


class ManyformerConfig(PreTrainedConfig):
    """The recipe of a model and its keywords, which are all that building it needs."""

    model_type = MODEL_TYPE
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "past_key_values"]

    manyformer: dict[str, Any] | None = None
    """The recipe, its keywords and the version of this library."""
    tie_word_embeddings: bool = True

    def build(self) -> Model:
        """A new model of the recipe. Raises UserError for a config without one."""
        if self.manyformer is None:
            raise UserError("the config names no recipe: load it from an exported folder or a run")
        return build(self.manyformer["recipe"], **self.manyformer["keywords"])

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Do nothing: `auto_map` names a module that imports this class, which therefore is not copied."""
