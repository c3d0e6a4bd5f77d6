"""Restrict training to a part of a model's weights: frozen parts, frozen layers, and low-rank adapters."""

from collections.abc import Iterator, Sequence
from typing import Literal

from torch import nn

from manyformer.config import RunConfig
from manyformer.errors import UserError, suggest_names
from manyformer.models import Model
from manyformer.surgery.lora import attach_lora, is_head
from manyformer.train.layer_depths import layer_depths


def adapt_model(model: Model, run: RunConfig) -> None:
    """Freeze what the run freezes, and put its adapters on what remains.

    Raises UserError for unknown names, for more layers than there are, and if nothing remains to be trained."""
    freeze_parts(model, run.frozen)
    if run.frozen_layers is not None:
        freeze_layers(model, run.frozen_layers)
    if run.lora.rank is not None:
        attach_lora(model, run.lora)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise UserError("frozen: all weights of the model are frozen, so nothing remains to be trained")


def freeze_parts(model: Model, parts: Sequence[str]) -> None:
    """Exclude the weights of the modules with these names from training. Raises UserError for unknown names."""
    modules = dict(model.named_modules())
    for part in parts:
        if part not in modules:
            raise UserError(f"frozen: the model has no part '{part}'; {suggest_names(part, filter(None, modules))}")
        _freeze(modules[part])


def freeze_layers(model: Model, layers: int | Literal["all"]) -> None:
    """Exclude the embedding and the first `layers` layers from training; with "all", everything but the head.

    Raises UserError if the model has fewer layers, or no single stack of them."""
    for module in _all_but_head(model) if layers == "all" else _lowest_layers(model, layers):
        _freeze(module)


def _all_but_head(model: Model) -> Iterator[nn.Module]:
    return (module for name, module in model.named_children() if not is_head(name))


def _lowest_layers(model: Model, layers: int) -> Iterator[nn.Module]:
    depths = layer_depths(model, "frozen_layers")
    if layers > depths.layers:
        raise UserError(f"frozen_layers is {layers}, but the model has {depths.layers} layers; all is everything below")
    for module in model.modules():
        weights = list(module.parameters())
        if weights and all(depths.by_weight[weight] <= layers for weight in weights):
            yield module


def _freeze(module: nn.Module) -> None:
    """Exclude the weights from training, and dropout from the module: it stays in evaluation mode."""
    module.requires_grad_(requires_grad=False)
    for part in module.modules():
        part.training = False
        part.train = lambda mode=True, part=part: part  # type: ignore[method-assign, misc]
