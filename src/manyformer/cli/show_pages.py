"""What `manyformer show` prints: the description of a recipe, or properties and mixing of its attention, measured."""

import inspect
import statistics
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from manyformer.analysis.heads.properties import ROUNDING, attention_properties, permutation_change
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.cli.console import Block, Heading, Note, Output, PageTable, format_bytes, format_count
from manyformer.cli.model_arguments import is_folder, load_model, read_keywords
from manyformer.config import describe_keywords
from manyformer.config.published_sizes import published_size
from manyformer.models import Model
from manyformer.recipes import Recipe, RecipeCard
from manyformer.recipes.parts.cards import PROMISES
from manyformer.recipes.parts.model_summary import ForwardCost, ModuleRow, count_parameters, module_rows
from manyformer.recipes.parts.registry import task_of

if TYPE_CHECKING:
    from manyformer.analysis.heads.properties import AttentionProperties
    from manyformer.models.tasks import Inputs

PROPERTIES_LENGTH = 64
"""The length of the input in tokens, unless the model has a fixed length or allows less."""


def recipe_page(recipe: Recipe, model: Model, cost: ForwardCost) -> Iterator[Block]:
    """The description of a recipe, with the modules and cost of `model`."""
    card = recipe.card
    yield f"{card.name}: {card.title}\n"
    facts = {"summary": card.summary, "paper": card.paper, "task": card.task.name, "cost": card.cost}
    yield PageTable(("", ""), {**facts, "runs on": ", ".join(card.backends)}.items())
    yield f"\n{inspect.getdoc(recipe.build) or ''}"
    yield Heading("Contracts, tested by `manyformer check`")
    yield PageTable(("contract", "", "meaning, or why it is not promised"), _contract_rows(card))
    yield Heading("Keywords")
    rows = [
        (k.name, k.type, _format_default(k.default), _format_default(model.spec.keywords[k.name]), k.meaning)
        for k in describe_keywords(recipe.signature)
    ]
    yield PageTable(("keyword", "type", "default", "value", ""), rows)
    total = count_parameters(model)
    yield Heading(f"Modules and parameters: {total:,} in total")
    yield PageTable(
        ("module", "kind", "parameters", "share", ""), _module_rows(module_rows(model), total), right=(2, 3)
    )
    yield Heading(f"Cost at length {cost.length}")
    yield PageTable(("", "", ""), _cost_rows(model, cost), right=(1,))


SCREEN_KEYWORDS = 14
SCREEN_MODULES = 12
"""The most keywords and modules that are shown within a screen of 60 lines."""


def recipe_screen(recipe: Recipe, model: Model, cost: ForwardCost, width: int) -> Iterator[Block]:
    """`recipe_page` within 60 lines of `width` columns: no word is broken, and what is left out is counted."""
    card = recipe.card
    spec = model.spec
    yield textwrap.shorten(f"{card.name}: {card.title}", width)
    facts = {"summary": card.summary, "paper": card.paper, "task": card.task.name, "cost": card.cost}
    if card.name != spec.recipe:
        facts = {"is": f"`{spec.recipe}` with {_published_keywords(card.name)}", **facts}
    if card.state is not None:
        facts["state"] = {"constant": "constant in the length", "grows": "grows with the length"}[card.state]
    facts["promises"] = ", ".join(card.promises) or "none"
    reasons = [name for name in card.reasons if name in PROMISES]
    if reasons:
        facts["not"] = ", ".join(reasons)
    facts["runs on"] = ", ".join(card.backends)
    yield ""
    for name, text in facts.items():
        yield _wrapped(f"{name:<9}", text, width)
    yield ""
    yield _wrapped("", (inspect.getdoc(recipe.build) or "").split("\n\n")[0], width, lines=4)
    keywords = describe_keywords(recipe.signature)
    shown = keywords[:SCREEN_KEYWORDS]
    yield "\nKeywords"
    yield from _screen_rows(
        [(k.name, textwrap.shorten(_format_default(spec.keywords[k.name]), 16), k.meaning) for k in shown], width
    )
    if len(keywords) > len(shown):
        yield f"... {len(keywords) - len(shown)} more: --all"
    total = count_parameters(model)
    rows = [row for row in module_rows(model) if row.level <= 1]
    yield f"\nModules and parameters: {total:,} in total"
    yield from _screen_rows(
        [(name, f"{number}  {share:>5}", kind) for name, kind, number, share, _ in _module_rows(rows, total)][
            :SCREEN_MODULES
        ],
        width,
    )
    if len(rows) > SCREEN_MODULES:
        yield f"... {len(rows) - SCREEN_MODULES} more: --all"
    yield f"\nCost at length {cost.length}"
    yield from _screen_rows(list(_cost_rows(model, cost)), width)
    yield "\n--all shows everything; `manyformer check` tests the promises."


def _published_keywords(name: str) -> str:
    size = published_size(name)
    return "" if size is None else " ".join(f"{key}={value}" for key, value in size.keywords.items())


def _wrapped(label: str, text: str, width: int, lines: int = 2) -> str:
    """A labelled text of at most so many lines, broken between words."""
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        max_lines=lines,
        placeholder=" ...",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _screen_rows(rows: Sequence[tuple[str, str, str]], width: int) -> Iterator[str]:
    """Rows in columns, of which the last is cut between words where it would pass the width."""
    names = max((len(row[0]) for row in rows), default=0)
    values = max((len(row[1]) for row in rows), default=0)
    for name, value, text in rows:
        start = f"{name:<{names}}  {value:>{values}}  "
        yield (
            start + textwrap.shorten(text, max(width - len(start), 4), placeholder=" ...", break_on_hyphens=False)
        ).rstrip()


def _contract_rows(card: RecipeCard) -> Iterable[tuple[str, str, str]]:
    for name, meaning in PROMISES.items():
        yield name, "no" if name in card.reasons else "yes", card.reasons.get(name, meaning)
    for contract in sorted(card.reasons.keys() - PROMISES.keys()):
        yield contract, "no", card.reasons[contract]


def _module_rows(rows: list[ModuleRow], total: int) -> Iterable[tuple[str, str, str, str, str]]:
    for part in rows:
        times = f" (x {part.times})" if part.times > 1 else ""
        number = f"{part.parameters:,}" if part.parameters else ""
        share = ""
        if part.parameters:
            share = f"{part.parameters / total:.1%}"
        yield "  " * part.level + part.name + times, part.kind, number, share, part.note


def _cost_rows(model: Model, cost: ForwardCost) -> Iterable[tuple[str, str, str]]:
    sides = ""
    if task_of(model).takes_source:
        sides = ", source and target"
    yield (
        "forward pass",
        f"{format_count(cost.flops)}FLOP",
        f"one sequence of {cost.length} tokens{sides}; masked pairs are counted if they are computed",
    )
    yield "training step", f"{format_count(3 * cost.flops)}FLOP", "three times the forward pass"
    yield "weights", format_bytes(4 * count_parameters(model)), "float32"
    if cost.state_bytes is not None and cost.bytes_per_token is not None:
        yield "state", format_bytes(cost.state_bytes), f"after {cost.length} tokens, float32"
        yield "state per token", format_bytes(cost.bytes_per_token), "added by each further token"
    else:
        yield "state", "none", "it does not decode incrementally"


def _format_default(value: object) -> str:
    if value is None:
        return "null"
    if value is inspect.Parameter.empty:
        return ""
    return str(value)


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


def _properties_page(layers: "Sequence[AttentionProperties]", change: float) -> Iterator[Block]:
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


def describe_measured(name: str, inputs: "Inputs") -> str:
    """The model and the inputs of a measurement, for a person."""
    weights = "tiny sizes, random weights"
    if is_folder(name):
        weights = "trained weights"
    return f"{name}: {weights}, {inputs.tokens.shape[1]} random tokens"


def random_inputs(model: Model, length: int | None) -> "Inputs":
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


def _hull(properties: "AttentionProperties") -> str:
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


def _score_row(properties: "AttentionProperties") -> tuple[str, ...]:
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
    from manyformer.analysis.figures import draw_mixing, mixing_strengths

    model = measured_model(name, recipe, arguments)
    inputs = random_inputs(model, length)
    strengths = mixing_strengths(model, inputs)
    picture = draw_mixing(strengths, path=out)
    page = [describe_measured(name, inputs), "outputs downwards, exchanged tokens to the right", picture]
    notes = [] if out is None else [Note(f"wrote {out}")]
    return Output({"length": len(strengths), "strengths": strengths}, [*page, *notes])
