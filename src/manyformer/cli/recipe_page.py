"""The description of a recipe that `manyformer show` prints."""

import inspect
from collections.abc import Iterable

from manyformer.cli.console import format_bytes, format_count, print_heading, print_result, print_table
from manyformer.config import describe_keywords
from manyformer.model_summary import ForwardCost, ModuleRow, count_parameters, module_rows
from manyformer.models import Model
from manyformer.recipes import Recipe, RecipeCard
from manyformer.recipes.registry import PROMISES, task_of


def print_page(recipe: Recipe, model: Model, cost: ForwardCost) -> None:
    """Print the description of a recipe, with the modules and cost of `model`."""
    card = recipe.card
    print_result(f"{card.name}: {card.title}", "")
    facts = {"summary": card.summary, "paper": card.paper, "task": card.task.name, "cost": card.cost}
    print_table(("", ""), {**facts, "runs on": ", ".join(card.backends)}.items())
    print_result("", inspect.getdoc(recipe.build) or "")
    print_heading("Contracts, tested by `manyformer check`")
    print_table(("contract", "", "meaning, or why it is not promised"), _contract_rows(card))
    print_heading("Keywords")
    rows = [
        (k.name, k.type, _format_default(k.default), _format_default(model.spec.keywords[k.name]), k.meaning)
        for k in describe_keywords(recipe.signature)
    ]
    print_table(("keyword", "type", "default", "value", ""), rows)
    total = count_parameters(model)
    print_heading(f"Modules and parameters: {total:,} in total")
    print_table(("module", "kind", "parameters", "share", ""), _module_rows(module_rows(model), total), right=(2, 3))
    print_heading(f"Cost at length {cost.length}")
    print_table(("", "", ""), _cost_rows(model, cost), right=(1,))


def _contract_rows(card: RecipeCard) -> Iterable[tuple[str, str, str]]:
    for name, meaning in PROMISES.items():
        yield name, "no" if name in card.reasons else "yes", card.reasons.get(name, meaning)
    for contract in sorted(card.reasons.keys() - PROMISES.keys()):
        yield contract, "no", card.reasons[contract]


def _module_rows(rows: list[ModuleRow], total: int) -> Iterable[tuple[str, str, str, str, str]]:
    for part in rows:
        times = f" (x {part.times})" if part.times > 1 else ""
        number = f"{part.parameters:,}" if part.parameters else ""
        share = f"{part.parameters / total:.1%}" if part.parameters else ""
        yield "  " * part.level + part.name + times, part.kind, number, share, part.note


def _cost_rows(model: Model, cost: ForwardCost) -> Iterable[tuple[str, str, str]]:
    sides = ", source and target" if task_of(model).takes_source else ""
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
    return "null" if value is None else "" if value is inspect.Parameter.empty else str(value)
