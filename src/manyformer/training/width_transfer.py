"""Learning rates that transfer over widths: the maximal update parametrization (Yang et al. 2021, arXiv:2203.03466).

A rate that is best for a narrow base model is then about best for a wide one. The form is that of table 8 for Adam. Its
multipliers of outputs are in the weights: Adam trains a weight that is multiplied by A as it trains one whose first
values and rate are A times as large. So the model stays an ordinary one."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.config import MupConfig, RunConfig
from manyformer.models import Model
from manyformer.models.embedding import TokenEmbedding
from manyformer.models.head import OutputHead
from manyformer.nn.feed_forward.mixture_of_experts import ExpertLinear
from manyformer.recipes import build
from manyformer.recipes.parts.registry import build_on_meta

WIDTH = "dim"
SCALED_KEYWORDS = ("heads", "kv_heads", "ff_dim")
"""Keywords that are as many times smaller in the base model as the width, if the run sets them."""

LAST_NORM = "body.norm."
"""The norm between the layers and the head, which holds the multiplier of a head that is tied to the embedding."""


class WidthScale(NamedTuple):
    """How a weight differs from that of the base model: the factors on its learning rate and on its first scale."""

    rate: float
    scale: float


def weight_transfers(run: RunConfig, model: nn.Module) -> dict[str, WidthScale]:
    """The factors of each weight by its name, all of them 1 for a model of the base width; empty without `mup`.

    Raises UserError for a model whose weights cannot be told by the base model's."""
    if run.mup.base_width is None:
        return {}
    assert isinstance(model, Model)
    base = build_on_meta(run.recipe, base_keywords(run.mup, model.spec.keywords))
    return _transfers(model, base, run.mup)


def rate_scales(run: RunConfig, model: nn.Module) -> Mapping[str, float]:
    """The factor on the learning rate of each weight by its name; empty without `mup`."""
    return {name: transfer.rate for name, transfer in weight_transfers(run, model).items()}


@torch.no_grad()
def scale_first_weights(run: RunConfig, model: Model) -> None:
    """Give new weights the scales that follow from those of the base model, which is built for that with the same seed.

    Random numbers of the process go on as if nothing had been drawn."""
    if run.mup.base_width is None or run.mup.form == "simple":
        return
    transfers = weight_transfers(run, model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        base = build(run.recipe, **base_keywords(run.mup, model.spec.keywords))
    base_weights = dict(base.named_parameters())
    for name, weight in model.named_parameters():
        own_size = _root_mean_square(weight)
        # what begins with zeros begins with zeros at every width
        if own_size:
            factor = transfers[name].scale * _root_mean_square(base_weights[name]) / own_size
            # a sampled size of a large matrix differs in its last digits alone: the base model itself is left as it is
            if factor != 1.0:
                weight.mul_(factor)


def base_keywords(config: MupConfig, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of the base model. Raises UserError for a model without a width, or for sizes that do not divide."""
    width = keywords.get(WIDTH)
    if not isinstance(width, int):
        raise UserError("mup.base_width goes with model.dim, the width that differs: set model.dim")
    base: dict[str, Any] = {**keywords, WIDTH: config.base_width}
    assert config.base_width is not None
    for name in SCALED_KEYWORDS:
        size = keywords.get(name)
        if not isinstance(size, int):
            continue
        scaled = size * config.base_width
        if scaled % width:
            remedy = f"set model.{name} to a multiple of {width // math.gcd(width, config.base_width)}"
            problem = f"model.{name} {size} has no counterpart at mup.base_width {config.base_width}"
            raise UserError(f"{problem}, because it grows with model.dim {width} (heads are equally wide); {remedy}")
        base[name] = scaled // width
    return base


def _transfers(model: Model, base: Model, config: MupConfig) -> dict[str, WidthScale]:
    base_shapes = {name: weight.shape for name, weight in base.named_parameters()}
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(weight, []).append(module)
    ratio = _embedding_ratio(model, base)
    transfers: dict[str, WidthScale] = {}
    tied_to_head = False
    for name, weight in model.named_parameters():
        if name not in base_shapes or len(base_shapes[name]) != weight.ndim:
            raise UserError(f"mup.base_width {config.base_width}: the base model has no weight like {name}")
        transfers[name] = _transfer(name, weight, base_shapes[name], owners[weight])
        if any(isinstance(owner, nn.Embedding) for owner in owners[weight]):
            # what is looked up is multiplied by more in a wider model of some recipes
            if name.startswith("embed.token."):
                transfers[name] = WidthScale(1 / ratio, 1 / ratio)
            tied_to_head |= any(isinstance(owner, OutputHead) for owner in owners[weight])
    if config.form == "simple":
        return {name: transfer._replace(scale=1.0) for name, transfer in transfers.items()}
    if tied_to_head:
        width_ratio = model.spec.keywords[WIDTH] / base.spec.keywords[WIDTH]
        _multiply_last_norm(transfers, ratio / width_ratio)
    return transfers


def _transfer(name: str, weight: Tensor, base_shape: torch.Size, owners: list[nn.Module]) -> WidthScale:
    """The factors of a weight by the dimensions that grow with the width (table 8)."""
    growing = [size for size, base_size in zip(weight.shape, base_shape) if size != base_size]
    multiplies = all(isinstance(owner, nn.Linear | ExpertLinear | OutputHead) for owner in owners)
    if not multiplies or weight.ndim < 2:
        if len(growing) > 1:
            shape = tuple(weight.shape)
            problem = f"{name} {shape} grows with the width in several dimensions and is no linear layer's"
            raise UserError(f"mup: {problem}, so that its rate is unknown; compare such a model at one width")
        # vectors, and tables whose rows are looked up
        return WidthScale(1.0, 1.0)
    inputs = weight.shape[-1] / base_shape[-1]
    if weight.shape[-2] == base_shape[-2]:
        # outputs of a fixed number, such as logits: divided by the width ratio
        return WidthScale(1 / inputs, 1 / inputs)
    return WidthScale(1 / inputs, 1 / math.sqrt(inputs))


def _embedding_ratio(model: Model, base: Model) -> float:
    """How many times what `model` multiplies embeddings by is that of the base model."""
    embed = getattr(model, "embed", None)
    base_embed = getattr(base, "embed", None)
    if isinstance(embed, TokenEmbedding) and isinstance(base_embed, TokenEmbedding):
        return embed.scale / base_embed.scale
    return 1.0


def _multiply_last_norm(transfers: dict[str, WidthScale], factor: float) -> None:
    """Multiply what a tied head reads, in the place of its logits. Raises UserError where no norm is before it."""
    names = [name for name in transfers if name.startswith(LAST_NORM)]
    if not names:
        raise UserError(
            "mup divides the logits, and this model has a tied head without a norm before it; set mup.form=simple"
        )
    for name in names:
        transfers[name] = WidthScale(factor, factor)


def _root_mean_square(weight: Tensor) -> float:
    return float(weight.detach().double().square().mean().sqrt())
