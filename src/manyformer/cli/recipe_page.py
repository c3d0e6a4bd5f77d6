"""The page that `manyformer show` prints."""

import inspect
from collections.abc import Iterable

from manyformer.cli.console import format_bytes, format_count, print_heading, print_result, print_table
from manyformer.model_summary import ForwardCost, ModuleRow, count_parameters, module_rows
from manyformer.models import EncoderDecoder, Model
from manyformer.recipes import Recipe, RecipeCard
from manyformer.recipes.card_text import PROMISES, keywords


def print_page(recipe: Recipe, model: Model, cost: ForwardCost) -> None:
    """All about a recipe, as the model that its keywords make of it."""
    card = recipe.card
    print_result(f"{card.name}: {card.title}")
    print_result()
    facts = {"what is new": card.summary, "paper": card.paper, "task": card.task, "cost": card.cost}
    print_table(("", ""), list({**facts, "runs on": ", ".join(card.backends)}.items()))
    print_result()
    print_result(inspect.getdoc(recipe.build) or "")
    print_heading("Promises, tested by `manyformer check`")
    print_table(("promise", "", "meaning or reason why not"), _promises(card))
    print_heading("Keywords")
    rows = [
        (k.name, k.type, _shown(k.default), _shown(model.spec.keywords[k.name]), k.meaning) for k in keywords(recipe)
    ]
    print_table(("keyword", "type", "default", "here", ""), rows)
    print_heading(f"Structure and parameters: {count_parameters(model):,} in all")
    print_table(
        ("module", "kind", "parameters", "share", ""),
        _modules(module_rows(model), count_parameters(model)),
        right=(2, 3),
    )
    print_heading(f"Cost at length {cost.length}")
    print_table(("", "", ""), _costs(model, cost), right=(1,))


def _promises(card: RecipeCard) -> Iterable[tuple[str, str, str]]:
    for name, meaning in PROMISES.items():
        held = getattr(card, name)
        yield name, "yes" if held else "no", meaning if held else card.reasons[name]
    for contract in sorted(card.reasons.keys() - PROMISES.keys()):
        yield contract, "no", card.reasons[contract]


def _modules(rows: list[ModuleRow], total: int) -> Iterable[tuple[str, str, str, str, str]]:
    for part in rows:
        times = f" (x {part.times})" if part.times > 1 else ""
        number = f"{part.parameters:,}" if part.parameters else ""
        share = f"{part.parameters / total:.1%}" if part.parameters else ""
        yield "  " * part.level + part.name + times, part.kind, number, share, part.note


def _costs(model: Model, cost: ForwardCost) -> Iterable[tuple[str, str, str]]:
    both = ", source and target" if isinstance(model, EncoderDecoder) else ""
    yield (
        "forward pass",
        f"{format_count(cost.flops)}FLOP",
        f"one sequence of {cost.length} tokens{both}; masked pairs are counted where they are computed",
    )
    yield "training step", f"{format_count(3 * cost.flops)}FLOP", "three times the forward pass"
    yield "weights", format_bytes(4 * count_parameters(model)), "float32"
    if cost.state_bytes is not None and cost.bytes_per_token is not None:
        yield "state", format_bytes(cost.state_bytes), f"after {cost.length} tokens, float32"
        yield "state per token", format_bytes(cost.bytes_per_token), "what each further token adds"
    else:
        yield "state", "none", "it does not go on from earlier tokens"


def _shown(value: object) -> str:
    return "null" if value is None else "" if value is inspect.Parameter.empty else str(value)
