"""What `manyformer show` prints: the description of a recipe with its keywords, modules and cost."""

import inspect
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from manyformer.base.keyword_checks import describe_keywords
from manyformer.cli.console import Block, Heading, PageTable, format_bytes, format_count
from manyformer.config.graph_counts import counted_graphs
from manyformer.config.published_sizes import published_size
from manyformer.models import Model
from manyformer.recipes import Recipe, RecipeCard
from manyformer.recipes.parts.cards import PROMISES
from manyformer.recipes.parts.model_summary import ForwardCost, ModuleRow, count_parameters, module_rows
from manyformer.recipes.parts.registry import task_of


def recipe_page(recipe: Recipe, model: Model, cost: ForwardCost) -> Iterator[Block]:
    """The description of a recipe, with the modules and cost of `model`."""
    card = recipe.card
    yield f"{card.name}: {card.title}\n"
    facts = {"summary": card.summary, "paper": card.paper, "task": card.task.name, "cost": card.cost}
    facts["runs on"] = ", ".join(card.backends)
    if count := counted_graphs().get(model.spec.recipe):
        facts["compiled"] = count.sentence()
    yield PageTable(("", ""), facts.items())
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
    if count := counted_graphs().get(spec.recipe):
        facts["compiled"] = count.sentence()
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
