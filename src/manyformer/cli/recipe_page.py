"""The description of a recipe that `manyformer show` prints."""

import inspect
from collections.abc import Iterable, Iterator

from manyformer.cli.console import Block, Heading, PageTable, format_bytes, format_count
from manyformer.config import describe_keywords
from manyformer.model_summary import ForwardCost, ModuleRow, count_parameters, module_rows
from manyformer.models import Model
from manyformer.recipes import Recipe, RecipeCard
from manyformer.recipes.registry import PROMISES, task_of


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
