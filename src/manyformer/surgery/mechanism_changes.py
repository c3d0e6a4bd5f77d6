"""What changes between a saved model and one that starts from its weights: kernels, positions, masks, activations."""

from pathlib import Path

import torch
from torch import nn

from manyformer.dropout import Dropout
from manyformer.kernels import Kernel
from manyformer.models.model_files import read_spec
from manyformer.position import Position
from manyformer.recipes import get_recipe, recipe_names
from manyformer.residual import AddJoin

_WITHOUT_EFFECT = (Dropout, AddJoin, nn.Linear, nn.Embedding)
"""Modules whose descriptions differ by dropout, or by shapes, which are compared with the weights."""


def build_saved_structure(folder: Path) -> nn.Module | None:
    """The modules of the model saved in a folder, without memory for weights; None if its recipe is not imported."""
    spec = read_spec(folder)
    if spec.recipe not in recipe_names():
        return None
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return get_recipe(spec.recipe).build(**spec.keywords)


def describe_changes(saved: nn.Module, model: nn.Module, new_part: str | None = None) -> list[str]:
    """A sentence for each kind of module, such as a kernel, a position or an activation, that computes another thing.

    Weights are not compared, nor what has an effect in training alone, nor the modules of a part that is new."""
    saved_modules = dict(saved.named_modules())
    places = dict[tuple[str, str], list[str]]()
    left_out = tuple(f"{name}." for name, part in model.named_modules() if _is_mechanism(part))
    left_out += () if new_part is None else (new_part,)
    for name, module in model.named_modules():
        is_compared = name and name in saved_modules and not isinstance(module, _WITHOUT_EFFECT)
        if not is_compared or name.startswith(left_out):
            continue
        texts = _describe(saved_modules[name]), _describe(module)
        if texts[0] != texts[1]:
            places.setdefault(texts, []).append(name)
    return [f"{' and '.join(abbreviate(names))}: {old} becomes {new}" for (old, new), names in places.items()]


def _describe(module: nn.Module) -> str:
    """The class of a module and what its `extra_repr` says, in one line, for kernels and positions with all parts."""
    if _is_mechanism(module):
        return " ".join(repr(module).split())
    return f"{type(module).__name__}({module.extra_repr()})"


def _is_mechanism(module: nn.Module) -> bool:
    """Whether a module is compared as a whole, not part by part."""
    return isinstance(module, Kernel | Position)


def abbreviate(names: list[str]) -> list[str]:
    """Names as they are, or the first and how many others there are."""
    if len(names) < 4:
        return names
    return [f"{names[0]}", f"{len(names) - 1} others like it"]
