"""The recipe, keywords and tokenizer of the model that `init_from` names, for the settings that a run leaves open."""

from pathlib import Path

from manyformer.config import InitialModel
from manyformer.files.tokenizer_files import SHARED_TOKENIZER
from manyformer.keyword_checks import as_json
from manyformer.models.model_files import CONFIG_FILE, is_hugging_face, read_spec
from manyformer.recipes import recipe_names
from manyformer.recipes.encoder_heads import CLASSES, HEAD
from manyformer.recipes.registry import recipe_of_spec


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
    _, saved_keywords = recipe_of_spec(spec, folder)
    # the data decides the head
    keywords = {name: as_json(value) for name, value in saved_keywords.items() if name not in (HEAD, CLASSES)}
    return InitialModel(path, spec.recipe, keywords, (folder / SHARED_TOKENIZER).is_file())
