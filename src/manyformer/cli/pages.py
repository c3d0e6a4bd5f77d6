"""The page that `manyformer show` prints."""

import inspect
from collections.abc import Iterable

from manyformer.cli.console import count, heading, say, say_table, size
from manyformer.models import EncoderDecoder, Model
from manyformer.recipes import Card, Recipe
from manyformer.recipes.card import PROMISES, keywords
from manyformer.summary import Cost, Part, count_parameters, parts


def print_page(recipe: Recipe, model: Model, cost: Cost) -> None:
    """All about a recipe, as the model that its keywords make of it."""
    card = recipe.card
    say(f"{card.name}: {card.title}")
    say()
    facts = {"what is new": card.new, "paper": card.paper, "task": card.task, "cost": card.cost}
    say_table(("", ""), list({**facts, "runs on": ", ".join(card.backends)}.items()))
    say()
    say(inspect.getdoc(recipe.build) or "")
    heading("Promises, tested by `manyformer check`")
    say_table(("promise", "", "meaning or reason why not"), _promises(card))
    heading("Keywords")
    rows = [
        (k.name, k.type, _shown(k.default), _shown(model.spec.keywords[k.name]), k.meaning) for k in keywords(recipe)
    ]
    say_table(("keyword", "type", "default", "here", ""), rows)
    heading(f"Structure and parameters: {count_parameters(model):,} in all")
    say_table(
        ("module", "kind", "parameters", "share", ""), _modules(parts(model), count_parameters(model)), right=(2, 3)
    )
    heading(f"Cost at length {cost.length}")
    say_table(("", "", ""), _costs(model, cost), right=(1,))


def _promises(card: Card) -> Iterable[tuple[str, str, str]]:
    for name, meaning in PROMISES.items():
        held = getattr(card, name)
        yield name, "yes" if held else "no", meaning if held else card.because[name]
    for contract in sorted(card.because.keys() - PROMISES.keys()):
        yield contract, "no", card.because[contract]


def _modules(rows: list[Part], total: int) -> Iterable[tuple[str, str, str, str, str]]:
    for part in rows:
        times = f" (x {part.times})" if part.times > 1 else ""
        number = f"{part.parameters:,}" if part.parameters else ""
        share = f"{part.parameters / total:.1%}" if part.parameters else ""
        yield "  " * part.level + part.name + times, part.kind, number, share, part.note


def _costs(model: Model, cost: Cost) -> Iterable[tuple[str, str, str]]:
    both = ", source and target" if isinstance(model, EncoderDecoder) else ""
    yield (
        "forward pass",
        f"{count(cost.flops)}FLOP",
        f"one sequence of {cost.length} tokens{both}; masked pairs are counted where they are computed",
    )
    yield "training step", f"{count(3 * cost.flops)}FLOP", "three times the forward pass"
    yield "weights", size(4 * count_parameters(model)), "float32"
    if cost.state_bytes is not None and cost.bytes_per_token is not None:
        yield "state", size(cost.state_bytes), f"after {cost.length} tokens, float32"
        yield "state per token", size(cost.bytes_per_token), "what each further token adds"
    else:
        yield "state", "none", "it does not go on from earlier tokens"


def _shown(value: object) -> str:
    return "null" if value is None else "" if value is inspect.Parameter.empty else str(value)
