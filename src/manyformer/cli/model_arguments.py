"""What a NAME on the command line means: a recipe, or a folder that holds a run or a saved model."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manyformer.errors import UserError, UserErrors, nearest

if TYPE_CHECKING:
    from manyformer.generate import Decoding, Translator
    from manyformer.models import Model
    from manyformer.recipes import Recipe


def is_folder(name: str) -> bool:
    """Whether a name means a folder rather than a recipe: it exists, or it looks like a path."""
    return Path(name).is_dir() or "/" in name


def model_of(name: str, words: list[str]) -> "tuple[Recipe, dict[str, Any]]":
    """The recipe that `name` means and its keywords: those of the saved model, changed by `words` (KEY=VALUE)."""
    from manyformer.models.model_files import read_config
    from manyformer.recipes import get_recipe

    keywords: dict[str, Any] = {}
    if is_folder(name):
        name, keywords = read_config(model_folder(name))
    recipe = get_recipe(name)
    return recipe, {**keywords, **read_keywords(recipe, words)}


def changed_keywords(name: str, words: list[str]) -> "dict[str, Any]":
    """What `words` (KEY=VALUE) change of the model in the folder `name`."""
    from manyformer.models.model_files import read_config
    from manyformer.recipes import get_recipe

    recipe, _ = read_config(model_folder(name))
    return read_keywords(get_recipe(recipe), words)


def model_folder(name: str) -> Path:
    """The folder of the model that `name` holds, directly or as a run. Raises UserError with what there is instead."""
    folder = Path(name)
    if not folder.is_dir():
        raise UserError(f"there is no folder {name}; {_runs_beside(name)}")
    for candidate in (folder, folder / "model"):
        if (candidate / "config.json").is_file():
            return candidate
    if (folder / "checkpoints").is_dir():
        raise UserError(f"the run {name} has no final model yet: the same train command goes on with it")
    raise UserError(f"{name} holds neither a model (config.json) nor a run; {_runs_beside(name)}")


def copy_tokenizers(folder: Path, to: Path) -> None:
    """Let the model in the folder `to` read as the one in `folder` does."""
    for file in folder.glob("tokenizer*.json"):
        shutil.copy2(file, to / file.name)


def _runs_beside(name: str) -> str:
    runs = sorted(str(path.parent.parent) for path in Path("runs").rglob("model/config.json"))
    return nearest(name, runs) if runs else "no run in ./runs has a model: `manyformer train` makes one"


def read_keywords(recipe: "Recipe", words: list[str]) -> dict[str, Any]:
    """KEY=VALUE, --key=value or --key value as keywords of `recipe`. Raises UserErrors for all mistakes together."""
    from manyformer.config.keywords import check_keyword
    from manyformer.config.overrides import parse_overrides
    from manyformer.config.setting_layers import SettingError

    found, mistakes = parse_overrides(words)
    known = [f"model.{name}" for name in recipe.signature.parameters]
    keywords: dict[str, Any] = {}
    for override in found:
        name = override.key.removeprefix("model.")
        keywords[name], wrong = check_keyword(name, override.value, recipe.signature, known)
        if wrong:
            mistakes.append(SettingError(override.spot, override.key, wrong))
    if mistakes:
        raise UserErrors(map(str, mistakes))
    return keywords


def place(device: str | None) -> str:
    """The device that is meant: a GPU where there is one, unless told otherwise. Raises UserError for a missing one."""
    import torch

    there = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    if device is None:
        return there[-1]
    if device.partition(":")[0] not in there:
        raise UserError(f"--device {device} is not to be had here; known: {', '.join(there)}")
    return device


def paths_of(data: list[str] | None) -> str | list[str] | None:
    """What --data names: nothing, one file, or several."""
    return None if not data else data[0] if len(data) == 1 else data


def writer(name: str, device: str | None = None) -> "Model":
    """The model in the folder `name`, which writes text. Raises UserError for one that does not or has no tokenizer."""
    from manyformer.api import load
    from manyformer.models import EncoderDecoder, LanguageModel

    model = load(model_folder(name))
    if not isinstance(model, LanguageModel | EncoderDecoder):
        raise UserError(f"the model in {name} ({model.spec.recipe}) does not write; `manyformer evaluate` scores it")
    if model.tokenizer is None:
        raise UserError(f"the model in {name} was saved without a tokenizer, so it cannot read or write text")
    return model.to(place(device))


def translator(name: str, decoding: "Decoding", device: str | None = None) -> "Translator":
    """The encoder-decoder in the folder `name`, ready to translate. Raises UserError for any other model."""
    from manyformer.generate import Translator
    from manyformer.models import EncoderDecoder

    model = writer(name, device)
    if not isinstance(model, EncoderDecoder):
        raise UserError(f"the model in {name} goes on with a text; `manyformer generate` lets it write")
    return Translator(model, tokenizer=model.tokenizer, decoding=decoding)
