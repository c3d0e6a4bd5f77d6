"""The config of this library's models in `transformers`, and runs and saved models as `from_pretrained` reads them."""

import os
import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerFast

from manyformer.data.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.data.tokenizer import Tokenizer
from manyformer.errors import UserError
from manyformer.files import SHARED_TOKENIZER, SOURCE_TOKENIZER
from manyformer.files.json_records import read_json
from manyformer.files.verified_folder import VerifiedFolder
from manyformer.interop.auto_classes import auto_class_of
from manyformer.interop.exported_config import config_fields, generation_fields, special_token_ids
from manyformer.interop.foreign_config import MODEL_TYPE
from manyformer.interop.tokenizer_export import write_tokenizer
from manyformer.models import Model
from manyformer.models.generation_settings import GENERATION_FILE, GenerationSettings
from manyformer.models.model_files import CONFIG_FILE
from manyformer.recipes import build, read_saved_recipe


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


class SavedModel:
    """A saved model of this library in a folder, and what `transformers` asks of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def at(cls, name: Any) -> "SavedModel | None":
        """The model in a folder of a run or of a saved model; None for all other names."""
        if not isinstance(name, str | os.PathLike):
            return None
        for folder in (Path(name), Path(name) / "model"):
            if (file := folder / CONFIG_FILE).is_file():
                content = read_json(file, "the description of a model")
                if isinstance(content, dict) and "recipe" in content:
                    return cls(folder)
                return None
        return None

    @cached_property
    def tokenizers(self) -> TokenizerPair | None:
        """Its tokenizers and the names of its labels; None if it was saved without."""
        files = VerifiedFolder.open(self.folder)
        if SHARED_TOKENIZER in files or SOURCE_TOKENIZER in files:
            return load_tokenizers(self.folder)
        return None

    @cached_property
    def empty_model(self) -> Model:
        """The model without values, with its tokenizers, labels and settings of generation."""
        recipe, keywords = read_saved_recipe(self.folder)
        pair = self.tokenizers
        try:
            with torch.device("meta"):
                model = build(recipe.card.name, **keywords)
        except UserError as error:
            raise UserError(f"{self.folder / CONFIG_FILE}: {error}") from None
        if pair is not None:
            if pair.source is pair.target:
                model.tokenizer = pair.source
            else:
                model.tokenizer = (pair.source, pair.target)
            model.labels = pair.labels
        files = VerifiedFolder.open(self.folder)
        if GENERATION_FILE in files:
            model.generation = GenerationSettings.read(files.file(GENERATION_FILE))
        return model

    def config(self) -> dict[str, Any]:
        """The fields of its config."""
        pair = self.tokenizers
        return config_fields(self.empty_model) | special_token_ids(pair.target if pair else None)

    def generation_config(self) -> GenerationConfig | None:
        """How it generates; None if it does not."""
        fields = generation_fields(self.empty_model)
        if fields is None:
            return None
        return GenerationConfig(**fields)

    def write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer of its inputs. Raises UserError if it has none."""
        pair = self.tokenizers
        model = self.empty_model
        if pair is None or not isinstance(pair.source, Tokenizer):
            raise UserError(f"{self.folder} was saved without a tokenizer")
        write_tokenizer(folder, pair.source, auto_class_of(model), model.max_length)


class ManyformerTokenizer(PreTrainedTokenizerFast):
    """The tokenizer of a run or a saved model, for `AutoTokenizer`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *inputs: Any, **options: Any) -> Any:
        saved = SavedModel.at(pretrained_model_name_or_path)
        if saved is None:
            return super().from_pretrained(pretrained_model_name_or_path, *inputs, **options)
        with tempfile.TemporaryDirectory() as folder:
            saved.write_tokenizer(Path(folder))
            return PreTrainedTokenizerFast.from_pretrained(folder, *inputs, **options)


def let_auto_config_read_runs() -> None:
    """Extend `AutoConfig.from_pretrained`, which all `AutoModel` classes call first, by folders of this library.

    These have no `model_type`, without which `transformers` cannot choose a class. All other names are passed on."""
    original = AutoConfig.from_pretrained

    def from_pretrained(pretrained_model_name_or_path: Any, **options: Any) -> Any:
        saved = SavedModel.at(pretrained_model_name_or_path)
        if saved is None:
            return original(pretrained_model_name_or_path, **options)
        _, unused = ManyformerConfig.get_config_dict(saved.folder, **options)
        for name in ("trust_remote_code", "code_revision"):
            unused.pop(name, None)
        return ManyformerConfig.from_dict(saved.config(), **unused)

    AutoConfig.from_pretrained = from_pretrained  # type: ignore[method-assign]
