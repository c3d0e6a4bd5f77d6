"""What `manyformer show --properties` and `--mixing` print: properties and mixing of attention, measured."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from manyformer.analysis.figures import draw_mixing, mixing_strengths
from manyformer.analysis.heads.properties import (
    ROUNDING,
    AttentionProperties,
    attention_properties,
    permutation_change,
)
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.cli.console import Block, Note, Output, PageTable
from manyformer.cli.model_arguments import is_folder, load_model, read_keywords
from manyformer.models import Model
from manyformer.models.tasks import Inputs
from manyformer.recipes import Recipe
from manyformer.recipes.parts.registry import task_of

PROPERTIES_LENGTH = 64
"""The length of the input in tokens, unless the model has a fixed length or allows less."""


def measured_properties(name: str, recipe: Recipe, arguments: list[str] | None, length: int | None) -> Output:
    """The properties of a trained model, or of a recipe with tiny sizes and random weights, measured.

    Raises UserError for a recipe whose attention no kernel computes, and for keywords with a trained model."""
    model = measured_model(name, recipe, arguments)
    inputs = random_inputs(model, length)
    layers = attention_properties(model, inputs)
    change = permutation_change(model, inputs)
    if not layers:
        raise UserError(
            f"no kernel computes the attention of {recipe.card.name}, so there are no properties to measure"
        )
    records = [{**layer._asdict(), "in_convex_hull": layer.in_convex_hull} for layer in layers]
    value = {"length": inputs.tokens.shape[1], "layers": records, "permutation": change}
    return Output(value, [describe_measured(name, inputs), *_properties_page(layers, change)])


def _properties_page(layers: Sequence[AttentionProperties], change: float) -> Iterator[Block]:
    rows = [(p.part, p.kernel, _hull(p), _change(p.permutation_error), _change(p.key_order_error)) for p in layers]
    yield ""
    yield PageTable(("layer", "kernel", "outputs in the convex hull", "permuted tokens", "other order of keys"), rows)
    yield ""
    headers = ("layer", "asymmetry of q.k", "antisymmetric part of W_Q W_K^T", "rank of q.k", "variance of q.k")
    yield PageTable(headers, [_score_row(layer) for layer in layers])
    meaning = "they depend on the order"
    if change <= ROUNDING:
        meaning = "they do not change with the order"
    yield f"\npermuted tokens change the predictions of the model by {change:.1%}: {meaning}"


def measured_model(name: str, recipe: Recipe, arguments: list[str] | None) -> Model:
    """A trained model, which takes no keywords, or a recipe with tiny sizes and random weights. Raises UserError."""
    if not is_folder(name):
        # what holds of an attention's form holds of a small one, which is measured in a moment
        return build_tiny(recipe.card.name, read_keywords(recipe, arguments), 0)
    if arguments:
        raise UserError("what is measured of a trained model is that of its weights: leave the keywords out")
    return load_model(name, "cpu")


def describe_measured(name: str, inputs: Inputs) -> str:
    """The model and the inputs of a measurement, for a person."""
    weights = "tiny sizes, random weights"
    if is_folder(name):
        weights = "trained weights"
    return f"{name}: {weights}, {inputs.tokens.shape[1]} random tokens"


def random_inputs(model: Model, length: int | None) -> Inputs:
    """Two rows of random tokens, of 64 unless the model's length is fixed or it allows less."""
    task = task_of(model)
    if model.max_length is None:
        allowed = PROPERTIES_LENGTH
    else:
        allowed = min(PROPERTIES_LENGTH, model.max_length)
    size = task.fixed_length(model) or length or allowed
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(task.token_ids(model), (2, size), generator=generator)
    return task.example(model, tokens.to(model.device))


def _hull(properties: AttentionProperties) -> str:
    if not properties.in_convex_hull:
        if max(properties.hull_excess) > ROUNDING:
            return f"no, outside by {max(properties.hull_excess):.2g}"
        return "no"
    if properties.convex_weights:
        return "yes"
    return "not seen outside"


def _change(error: float | None) -> str:
    """How much an order matters: "same" up to rounding."""
    if error is None:
        return ""
    if error <= ROUNDING:
        return "same"
    return f"change by {error:.0%}"


def _score_row(properties: AttentionProperties) -> tuple[str, ...]:
    """Means over heads; the variance with the number of channels that it is compared with."""
    asymmetry = properties.asymmetry
    share = properties.antisymmetric_share
    return (
        properties.part,
        "" if asymmetry is None else f"{statistics.fmean(asymmetry):.2f}",
        "" if share is None else f"{statistics.fmean(share):.2f}",
        f"{max(properties.rank)} of at most {properties.rank_bound}",
        f"{statistics.fmean(properties.score_variance):.3g} (channels: {properties.head_dim})",
    )


def measured_mixing(
    name: str, recipe: Recipe, arguments: list[str] | None, length: int | None, out: Path | None
) -> Output:
    """How strongly each output depends on each token, measured. Raises UserError."""
    model = measured_model(name, recipe, arguments)
    inputs = random_inputs(model, length)
    strengths = mixing_strengths(model, inputs)
    picture = draw_mixing(strengths, path=out)
    page = [describe_measured(name, inputs), "outputs downwards, exchanged tokens to the right", picture]
    notes = [] if out is None else [Note(f"wrote {out}")]
    return Output({"length": len(strengths), "strengths": strengths}, [*page, *notes])
