"""A conversion: its two models, the rules of which it is made, and what is reported of it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models.model import Model
from manyformer.nn.core import NamedLayers

LayerGrowth = Literal["silent", "overlapping"]

KeyHeadPooling = Literal["mean", "first"]

LayerSharing = Literal["mean", "stepwise"]

RecipeKeywords = dict[str, Any]

OriginKind = Literal["copied", "derived", "new"]

# layers have their numbers as names, such as body.3.attention
_LAYER = re.compile(r"((?:encoder|decoder)\.)?body\.(\d+)\b")


@dataclass(frozen=True, kw_only=True)
class ConversionOptions:
    """How weights are derived where there is a choice.

    A deeper model has copies of layers that write nothing at first ("silent", Wu et al. 2024, LLaMA Pro,
    arXiv:2401.02415), or the layers of two overlapping copies of the model ("overlapping", Kim et al. 2024, SOLAR,
    arXiv:2312.15166). Fewer heads of keys and values are the mean of those that they replace (Ainslie et al. 2023, GQA,
    arXiv:2305.13245, section 2.1), or the first of them. Layers that are applied several times are the mean of those in
    whose places they are ("mean"), or layers at even distances, with the first and the last ("stepwise", Bae et al.
    2024, Relaxed Recursive Transformers, arXiv:2410.20672, section 2.3).
    """

    growth: LayerGrowth = "silent"
    pooling: KeyHeadPooling = "mean"
    sharing: LayerSharing = "stepwise"


class DerivedTensor(NamedTuple):
    """The value of a tensor of the converted model, and how it was derived."""

    value: Tensor
    how: str


@dataclass(frozen=True)
class ModelPair:
    """A model before and after a conversion.

    `tensors` are the trained ones of `source`, whose own may hold no numbers, `initial` those of `target`. These,
    `modules` and `new_modules` have a layer that is applied several times under the name of each place. `layers` has
    for each layer of a deeper model the number of the layer that it is a copy of, and is empty if depths are equal."""

    source: nn.Module
    target: Model
    options: ConversionOptions
    tensors: Mapping[str, Tensor]
    initial: Mapping[str, Tensor]
    modules: Mapping[str, nn.Module]
    new_modules: Mapping[str, nn.Module]
    layers: list[int]

    @classmethod
    def of(
        cls,
        source: nn.Module,
        target: Model,
        tensors: Mapping[str, Tensor] | None = None,
        options: ConversionOptions | None = None,
    ) -> "ModelPair":
        """The pair of these models. Raises UserError for depths between which there is no conversion."""
        options = ConversionOptions() if options is None else options
        old_depth = _depth(source)
        depth = _depth(target)
        is_resized = old_depth and depth and old_depth != depth
        if is_resized:
            layers = _copied_layers(old_depth, depth, options.growth)
        else:
            layers = []
        # init_from gives the tensors of a file beside a structure without memory
        tensors = tensors_by_place(source) if tensors is None else tensors
        modules = dict(named_places(source))
        new_modules = dict(named_places(target))
        return cls(source, target, options, tensors, tensors_by_place(target), modules, new_modules, layers)

    def old_name(self, name: str) -> str:
        """The name in the old model of a module or a tensor of the new one."""
        match = _LAYER.match(name)
        if match is None or not self.layers:
            return name
        return rename_layer(name, self.layers[int(match[2])])

    def trained(self, name: str) -> Tensor | None:
        """The tensor of the old model behind one of the new model, None if there is none."""
        return self.tensors.get(self.old_name(name))

    def old_module(self, name: str) -> nn.Module | None:
        """The module of the old model behind one of the new model, None if there is none."""
        return self.modules.get(self.old_name(name))

    def shared_places(self, name: str) -> list[int]:
        """The numbers of the places in which the layer of a tensor of the new model is applied; empty for one place."""
        match = _LAYER.match(name)
        if match is None:
            return []
        layer = self.new_modules[match[0]]
        # layers of the same side that are the same module
        others = [other for path in self.new_modules if (other := _LAYER.fullmatch(path)) and other[1] == match[1]]
        places = sorted(int(other[2]) for other in others if self.new_modules[other[0]] is layer)
        if len(places) > 1:
            return places
        return []

    def is_silent(self, name: str) -> bool:
        """Whether a tensor belongs to an inserted layer that writes nothing at first."""
        match = _LAYER.match(name)
        number = 0 if match is None else int(match[2])
        return (
            bool(self.layers)
            and self.options.growth == "silent"
            and number > 0
            and self.layers[number] == self.layers[number - 1]
        )


def rename_layer(name: str, number: int) -> str:
    """The name of the same module or tensor in the layer of this number."""
    return _LAYER.sub(lambda match: f"{match[1] or ''}body.{number}", name, count=1)


def named_places(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """All modules by the names of their places; a layer that is applied several times has several."""
    yield prefix, module
    places = {name: name for name in module._modules}
    if isinstance(module, NamedLayers) and module.places is not None:
        places = module.places
    for place, name in places.items():
        child = module._modules[name]
        if child is not None:
            yield from named_places(child, f"{prefix}.{place}" if prefix else place)


def tensors_by_place(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Tensor]:
    """The state dict, in which a layer that is applied several times has the names of all of its places."""
    tensors: dict[str, Tensor] = dict(model.state_dict(keep_vars=keep_vars))
    for path, module in model.named_modules():
        if not isinstance(module, NamedLayers) or module.places is None:
            continue
        outer = f"{path}." if path else ""
        for place, name in module.places.items():
            first = f"{outer}{name}."
            of_first = {key.removeprefix(first): tensor for key, tensor in tensors.items() if key.startswith(first)}
            tensors |= {f"{outer}{place}.{key}": tensor for key, tensor in of_first.items()}
    return tensors


def _depth(model: nn.Module) -> int:
    """The number of numbered layers, each as often as it is applied."""
    return len({match[2] for name, _ in named_places(model) if (match := _LAYER.match(name))})


def _copied_layers(old_depth: int, depth: int, growth: LayerGrowth) -> list[int]:
    """The layer of the old model that each layer of the new one is a copy of. Raises UserError if that cannot be."""
    if depth < old_depth:
        raise UserError(f"depth ({depth}) is below the {old_depth} layers of the model: no conversion removes layers")
    if growth == "silent":
        # copies stand behind the layer that they copy, evenly from the bottom to the top
        return [number * old_depth // depth for number in range(depth)]
    if depth % 2 or depth > 2 * old_depth:
        raise UserError(
            f"depth ({depth}) of two overlapping copies must be even and at most {2 * old_depth}, twice the model's"
        )
    # the first half of the new layers from the bottom, the second half up to the top; they overlap in the middle
    return [*range(depth // 2), *range(old_depth - depth // 2, old_depth)]


WeightRule = Callable[[ModelPair, str], DerivedTensor | None]
"""Derives a tensor of the converted model, named by the argument; None if the rule is not one for this tensor."""


class TransformedModel(NamedTuple):
    """A complete model, and how the tensors were derived whose names begin with the keys."""

    model: Model
    derivations: Mapping[str, str] = {}


@dataclass(frozen=True, kw_only=True)
class RecipeConversion:
    """How models of a recipe become models of another one.

    `keywords` makes keywords of the target from those of the source and those that were requested; by default equal
    names are equal. `rules` derive tensors that equal names do not explain. Tensors whose names match a key of `new`
    begin with their initial values, those of `left_behind` are dropped, for the reason that is the value. `transform`
    takes the place of all this for a conversion that is more than names: it gets the model and the keywords that were
    requested. `warnings` gets the keywords before and after.
    """

    source: str
    target: str
    paper: str
    finding: str
    keywords: Callable[[RecipeKeywords, RecipeKeywords], RecipeKeywords] = lambda source, requested: {}
    rules: Sequence[WeightRule] = ()
    new: Mapping[str, str] = field(default_factory=dict)
    left_behind: Mapping[str, str] = field(default_factory=dict)
    transform: Callable[[Model, RecipeKeywords], TransformedModel] | None = None
    warnings: Callable[[RecipeKeywords, RecipeKeywords], list[str]] = lambda source, target: []


class TensorOrigin(NamedTuple):
    """Where a tensor of a converted model comes from: copied, derived from trained ones, or new, and how."""

    name: str
    kind: OriginKind
    how: str = ""


class LayerTransfer(NamedTuple):
    """How far a new attention is from the one that it replaces, before and after the transfer."""

    name: str
    before: float
    after: float


class ConversionReport(NamedTuple):
    """What became of a model.

    `origins` are those of all tensors, `left_behind` the tensors of the old model that the new one does not have with
    the reasons. `changes` are sentences on modules that compute another thing, `warnings` on what the conversion may
    spoil. `parameters` are the numbers before and after. `difference` is the largest difference of logits on random
    tokens, None where the two models do not read the same inputs; `finding` is what the paper reports. `transfers` has
    the losses of attention transfer by layer, where there was one.
    """

    source: str
    target: str
    keywords: RecipeKeywords
    origins: Sequence[TensorOrigin]
    left_behind: Mapping[str, str]
    changes: Sequence[str]
    warnings: Sequence[str]
    parameters: tuple[int, int]
    difference: float | None
    paper: str
    finding: str
    transfers: Sequence[LayerTransfer] = ()


class ConvertedModel(NamedTuple):
    """A model in the mode of the one it was made from, with its tokenizer, and what became of the weights."""

    model: Model
    report: ConversionReport
