"""What the folder of a model says without its weights, whether this library or `transformers` wrote it."""

from pathlib import Path
from typing import Any

from manyformer.data.saved_tokenizers import TokenizerPair, load_tokenizers
from manyformer.errors import UserError
from manyformer.files.tokenizer_files import TOKENIZER_FILES
from manyformer.files.verified_folder import VerifiedFolder
from manyformer.interop.model_import import read_foreign_description
from manyformer.models.model_files import is_hugging_face
from manyformer.recipes import Recipe, get_recipe, read_saved_recipe


def read_recipe(folder: Path) -> tuple[Recipe, dict[str, Any]]:
    """The recipe and keywords of the model in a folder, those of the equal recipe for a model of `transformers`.

    Raises UserError for a folder without a model, and for one that no imported recipe equals."""
    if not is_hugging_face(folder):
        return read_saved_recipe(folder)
    description = read_foreign_description(folder)
    return get_recipe(description.family.recipe), description.keywords


def read_tokenizers(folder: Path) -> TokenizerPair:
    """The tokenizers and labels of the model in a folder. Raises UserError for a model that has none."""
    if is_hugging_face(folder):
        texts = read_foreign_description(folder).read_texts()
        if texts.tokenizer is not None:
            pair = texts.tokenizer if isinstance(texts.tokenizer, tuple) else (texts.tokenizer, texts.tokenizer)
            return TokenizerPair(*pair, texts.labels)
    elif any(name in VerifiedFolder.open(folder) for name in TOKENIZER_FILES):
        return load_tokenizers(folder)
    raise UserError(f"{folder} has no tokenizer, which reads the inputs of its model")
