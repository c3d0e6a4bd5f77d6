"""The recipe, keywords and tokenizer of the model that `init_from` names, for the settings that a run leaves open."""

from pathlib import Path
from typing import Any

from manyformer.config import InitialModel
from manyformer.config.keywords import check_keyword
from manyformer.files.json_records import DamagedFile
from manyformer.files.tokenizer_files import SHARED_TOKENIZER
from manyformer.models.model_files import CONFIG_FILE, is_hugging_face, read_spec
from manyformer.recipes import get_recipe, recipe_names
from manyformer.recipes.encoder_heads import CLASSES, HEAD


def model_folder(path: str | Path) -> Path:
    """The folder of a saved model, or that of the final model of the run in the folder `path`."""
    folder = Path(path)
    return folder / "model" if (folder / "model").is_dir() else folder


def describe_saved_model(path: str) -> InitialModel | None:
    """The saved model in the folder `path`, or of the run in it; None where there is none that could be loaded.

    Raises DamagedFile."""
    folder = model_folder(path)
    if not (folder / CONFIG_FILE).is_file() or is_hugging_face(folder):
        return None
    spec = read_spec(folder)
    if spec.recipe not in recipe_names():
        return None
    keywords = _checked_keywords(spec.recipe, spec.keywords, folder / CONFIG_FILE)
    return InitialModel(path, spec.recipe, keywords, (folder / SHARED_TOKENIZER).is_file())


def _checked_keywords(recipe: str, saved: dict[str, Any], file: Path) -> dict[str, Any]:
    """The saved keywords with the types of the recipe, without those of the head, which the data decides."""
    signature, keywords = get_recipe(recipe).signature, {}
    for name, value in saved.items():
        keywords[name], problem = check_keyword(name, value, signature, list(signature.parameters))
        if problem:
            raise DamagedFile(f"{file} is damaged: keywords.{name}: {problem}")
    return {name: value for name, value in keywords.items() if name not in (HEAD, CLASSES)}
