"""Saved models: a folder with config.json (the spec) and model.safetensors (the weights); no pickle."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_model
from torch import Tensor, nn

from manyformer.errors import UserError

FORMAT = 1
WEIGHTS_FILE = "model.safetensors"


class ModelSpec(NamedTuple):
    """The specification from which a model can be rebuilt: the recipe, all of its keywords, and the recipe's module."""

    recipe: str
    keywords: dict[str, Any]
    module: str = ""


def write_parts(model: nn.Module, spec: ModelSpec, folder: Path) -> None:
    """Write the spec and the weights of a model into an existing folder."""
    config = {"format": FORMAT, "recipe": spec.recipe, "recipe_module": spec.module, "keywords": spec.keywords}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_model(model, str(folder / WEIGHTS_FILE))


@contextmanager
def replacement_folder(path: Path) -> Iterator[Path]:
    """A new folder that atomically replaces the folder `path` when the block succeeds and is removed when it fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".part", dir=path.parent))
    try:
        yield draft
        for file in draft.iterdir():
            with open(file, "rb") as handle:
                os.fsync(handle.fileno())
        os.chmod(draft, 0o755)
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}-old-", dir=path.parent))
            os.rename(path, old / "was")
            os.rename(draft, path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(draft, path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def read_config(path: Path) -> tuple[str, dict[str, Any], str]:
    """The recipe, its keywords and its module of the model in the folder `path`; nothing is imported.

    Raises UserError where the folder holds no model.
    """
    file = path / "config.json"
    if not file.is_file():
        raise UserError(f"{path} holds no model: {file.name} is missing")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        return config["recipe"], config["keywords"], str(config.get("recipe_module", ""))
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is damaged: it is not the description of a model ({error})") from error


def read_weights(model: nn.Module, path: Path) -> None:
    """Fill `model` from the folder `path`. Raises UserError where the file is damaged or does not fit."""
    fill_weights(model, read_tensors(path), f"{path / WEIGHTS_FILE} does not fit its config.json")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The weights in the folder `path` by name. Raises UserError where there are none, or where the file is damaged."""
    file = path / WEIGHTS_FILE
    try:
        return load_file(str(file))
    except FileNotFoundError as error:
        raise UserError(f"{path} holds no weights: {file.name} is missing") from error
    except SafetensorError as error:
        raise UserError(f"{file} is damaged: {error}") from error


def fill_weights(model: nn.Module, tensors: dict[str, Tensor], error_prefix: str) -> None:
    """Copy `tensors` into the weights of `model`. Raises UserError, beginning with `error_prefix`, on a mismatch."""
    expected: dict[str, Tensor] = model.state_dict(keep_vars=True)
    if unknown := sorted(set(tensors) - set(expected)):
        raise UserError(f"{error_prefix}: it holds {unknown[0]}, which the model does not have")
    for name, value in tensors.items():
        if expected[name].shape != value.shape:
            shapes = f"{tuple(value.shape)}, the model {tuple(expected[name].shape)}"
            raise UserError(f"{error_prefix}: {name} has the shape {shapes}")
    # a tied weight is stored once, under one of its names
    filled_ids = {id(expected[name]) for name in tensors}
    if missing := [name for name, tensor in expected.items() if id(tensor) not in filled_ids]:
        raise UserError(f"{error_prefix}: {missing[0]} is missing")
    with torch.no_grad():
        for name, value in tensors.items():
            expected[name].copy_(value)
