"""The `AutoModel` classes of `transformers` that load models of this library, by the class of the model."""

from pathlib import Path
from typing import NamedTuple

from manyformer.errors import UserError
from manyformer.files.atomic_files import atomic_write_text
from manyformer.models import (
    DecisionTransformer,
    EncoderDecoder,
    ImageClassifier,
    LanguageModel,
    MaskedLM,
    Model,
    SpanReader,
    Tagger,
    TextClassifier,
)
from manyformer.models.model import model_name
from manyformer.recipes.registry import task_of

LOADER = "modeling_manyformer"
"""The module in an exported folder that `trust_remote_code` runs."""


class AutoClass(NamedTuple):
    """A kind of models in `transformers`.

    `suffix` ends the names of its classes, and `pipeline` is the hub's name of the kind. Texts that its models read
    begin with the start token if `begins`, and end with the end token if `ends`. Only those that `is_wrapped` have a
    class of this library, the others a class of `transformers` that `AutoModel` loads.
    """

    suffix: str
    pipeline: str
    begins: bool = True
    ends: bool = True
    is_wrapped: bool = True

    @property
    def auto_class(self) -> str:
        """The name of the class that loads such a model."""
        if self.is_wrapped:
            return f"AutoModelFor{self.suffix}"
        return "AutoModel"

    @property
    def architecture(self) -> str:
        """The name of the class of this library's models."""
        return f"ManyformerFor{self.suffix}"


AUTO_CLASSES: dict[type[Model], AutoClass] = {
    LanguageModel: AutoClass("CausalLM", "text-generation", begins=False, ends=False),
    EncoderDecoder: AutoClass("Seq2SeqLM", "text2text-generation", begins=False),
    MaskedLM: AutoClass("MaskedLM", "fill-mask"),
    TextClassifier: AutoClass("SequenceClassification", "text-classification"),
    Tagger: AutoClass("TokenClassification", "token-classification"),
    SpanReader: AutoClass("QuestionAnswering", "question-answering"),
    ImageClassifier: AutoClass("ImageClassification", "image-classification"),
}

NATIVE_CLASSES: dict[type[Model], AutoClass] = {
    DecisionTransformer: AutoClass("DecisionTransformer", "reinforcement-learning", is_wrapped=False),
}
"""The kinds of models that have a class of `transformers`, and none of this library beside it."""


def auto_class_of(model: Model) -> AutoClass:
    """The kind of a model in `transformers`. Raises UserError for one that has none."""
    kind = (AUTO_CLASSES | NATIVE_CLASSES).get(type(model))
    task = task_of(model)
    # captions and transcripts are written by encoder-decoders too, whose sources are no tokens
    if kind is None or (kind.suffix == "Seq2SeqLM" and task.generates != "answer"):
        raise UserError(
            f"{model_name(model)} is for {task.title}; what transformers can have are models of language, translation "
            "and masked text, classifiers of texts, tokens and images, and readers of answers"
        )
    return kind


LOADER_CODE = '''"""Loads this model with manyformer."""

try:
    from manyformer.interop.auto_model import {names}
except ImportError as error:
    raise ImportError("this model needs the package manyformer: pip install 'manyformer[hf]'") from error
'''


def write_loader(folder: Path) -> None:
    """Write the module that `auto_map` of a config names."""
    names = sorted(["ManyformerConfig", *(kind.architecture for kind in AUTO_CLASSES.values())])
    imported = "(\n" + "".join(f"        {name},\n" for name in names) + "    )"
    atomic_write_text(folder / f"{LOADER}.py", LOADER_CODE.format(names=imported))
