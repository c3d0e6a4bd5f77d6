"""The functions of the Python interface that build, load and explain models."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.base.plugins import import_modules
from manyformer.models import GenerativeModel, Model
from manyformer.models.layer_paths import explain_paths
from manyformer.models.model_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    GenerationSettings,
    is_hugging_face,
    open_saved_model,
    read_weights,
)
from manyformer.recipes import Recipe, all_recipes
from manyformer.recipes import build as build
from manyformer.recipes.parts.registry import recipe_of_spec

__all__ = ["build", "explain", "load", "recipes"]


def recipes() -> dict[str, Recipe]:
    """All recipes by name, with those of installed packages: `recipes()["transformer-lm"].card`, `.signature`."""
    return all_recipes()


def load(path: str | Path, *, keywords: Mapping[str, Any] | None = None, imports: Sequence[str] = ()) -> Model:
    """The model saved in the folder `path`, or the final model of the run in that folder, in evaluation mode.

    A folder that Hugging Face's `transformers` wrote gives the equal recipe with its weights and its tokenizer.

    `model.tokenizer` is the tokenizer that it was trained with, if one was saved. `keywords` of its recipe may be
    changed if the shapes of the weights stay the same: `load("runs/copy", keywords={"num_hashes": 8})`. `imports`
    names modules or .py files to import first, which define its recipe; installed packages that offer it need not be
    named. Raises UserError if the folder holds no model or is damaged or incomplete. No pickle is ever read, and no
    module that the folder names is imported."""
    # before the folder is read: its recipe may be one of these
    if imports:
        import_modules(imports)
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; a saved model is a folder with config.json and model.safetensors")
    # the folder of a run, whose final model lies in it
    if not (folder / "config.json").is_file() and (folder / "model" / "config.json").is_file():
        folder = folder / "model"
    if is_hugging_face(folder):
        return _imported(folder, keywords)
    spec, files = open_saved_model(folder)
    recipe, saved_keywords = recipe_of_spec(spec, folder)
    try:
        model = build(recipe.card.name, **{**saved_keywords, **(keywords or {})})
    except UserError as error:
        # what the caller has changed is not the file's
        if keywords:
            raise
        raise DamagedFile(f"{folder / CONFIG_FILE} is damaged: {error}") from None
    read_weights(model, files)
    if GENERATION_FILE in files:
        model.generation = GenerationSettings.read(files.file(GENERATION_FILE))
    if any(name.startswith("tokenizer") for name in files.sums):
        # imported here because loading a model without a tokenizer needs none of the data modules
        from manyformer.data.tokenizers.saved_tokenizers import load_tokenizers

        source, target, model.labels = load_tokenizers(files)
        model.tokenizer = source if source is target else (source, target)
    return model.eval()


def _imported(folder: Path, keywords: Mapping[str, Any] | None) -> Model:
    """The model in a folder of Hugging Face's `transformers`."""
    if keywords:
        raise UserError(
            f"{folder} holds a model of Hugging Face's transformers, which has no keywords to change: import it first"
        )
    # imported here because few models come from elsewhere
    from manyformer.conversion.hugging_face import import_model

    return import_model(folder).model


def explain(model: nn.Module, *inputs: Any) -> dict[str, str]:
    """For each kernel of `model` by name, which path computes it for these inputs and why.

    Printed, it says which file and which path compute each layer in training, for a prompt (prefill) and for one more
    token (step); `.layers` has the same as records, and `.stream` the names of the modules whose output is the residual
    stream, for hooks. Without inputs, the layers that `generate` decodes by `forward`
    because they have no faster one-token step."""
    if not inputs and isinstance(model, GenerativeModel):
        return dict.fromkeys(model.layers_without_step(), "decodes by forward: it has no one-token step")
    return explain_paths(model, inputs)
