"""What a conversion is, and what is reported of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from manyformer.models import Model
from manyformer.surgery.attention_transfer import LayerTransfer
from manyformer.surgery.model_pair import DerivedTensor, ModelPair

RecipeKeywords = dict[str, Any]
OriginKind = Literal["copied", "derived", "new"]


class TensorOrigin(NamedTuple):
    """Where a tensor of a converted model comes from: copied, derived from trained ones, or new, and how."""

    name: str
    kind: OriginKind
    how: str = ""


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


class TransformedModel(NamedTuple):
    """A complete model, and how the tensors were derived whose names begin with the keys."""

    model: Model
    derivations: Mapping[str, str] = {}


WeightRule = Callable[[ModelPair, str], DerivedTensor | None]
"""Derives a tensor of the converted model, named by the argument; None if the rule is not one for this tensor."""


@dataclass(frozen=True, kw_only=True)
class RecipeConversion:
    """How models of a recipe become models of another one.

    `keywords` makes keywords of the target from those of the source and those that were asked for; by default equal
    names are equal. `rules` derive tensors that equal names do not explain. Tensors whose names match a key of `new`
    begin with their initial values, those of `left_behind` are dropped, for the reason that is the value. `transform`
    takes the place of all this for a conversion that is more than names: it gets the model and the keywords that were
    asked for. `warnings` gets the keywords before and after.
    """

    source: str
    target: str
    paper: str
    finding: str
    keywords: Callable[[RecipeKeywords, RecipeKeywords], RecipeKeywords] = lambda source, asked: {}
    rules: Sequence[WeightRule] = ()
    new: Mapping[str, str] = field(default_factory=dict)
    left_behind: Mapping[str, str] = field(default_factory=dict)
    transform: Callable[[Model, RecipeKeywords], TransformedModel] | None = None
    warnings: Callable[[RecipeKeywords, RecipeKeywords], list[str]] = lambda source, target: []
