"""Advice for the tasks that no suite measures: by scores of comparisons, times of steps, counts, and cards.

Encoders, encoder-decoders, and models of images, graphs, sounds and actions are such."""

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from manyformer.analysis.comparisons.advice import CPU, Advice, AdviceRow, Candidate, Needs
from manyformer.analysis.comparisons.measured_rows import (
    ScoredComparison,
    ScoredRecipe,
    counted_costs,
    published_figures,
    scored_comparisons,
    state_by_growth,
    step_times,
)
from manyformer.analysis.planning.accelerators import ACCELERATORS
from manyformer.recipes.parts.cards import FAMILIES, CardText, listed_recipes

MOST_CANDIDATES = 3


def task_advice(needs: Needs) -> Advice:
    """Recipes of a task that no suite measures: by the scores of comparisons, then by time, then by their cards."""
    cards = {name: listed.card for name, listed in listed_recipes().items() if listed.card.task.name == needs.task}
    states = {name: _counted_state(card, needs.length) for name, card in cards.items()}
    excluded = {}
    for name in cards:
        # encoders keep no state, which no bound of it can rule out
        without_bound = needs if states[name] is not None else needs._replace(memory=None)
        reason = reason_against(without_bound, listed_recipes()[name], states[name], _least_minutes(name, needs))
        if reason:
            excluded[name] = reason
    comparisons = _comparisons_of(needs)
    rows = [row for comparison in comparisons for row in _comparison_rows(comparison) if row.recipe not in excluded]
    rows = [row._replace(state_bytes=states.get(row.recipe)) for row in rows]
    fitting = {name: card for name, card in cards.items() if name not in excluded}
    timed = _time_rows(list(fitting), needs.length)
    candidates = _scored_candidates(rows, comparisons)
    candidates += _unscored_candidates(fitting, timed, candidates)[: MOST_CANDIDATES - len(candidates)]
    finished = [_with_evidence(candidate, timed, needs) for candidate in candidates]
    limits = [*_task_limits(needs, comparisons, timed, cards), *budget_limits(needs)]
    return Advice(needs, tuple(finished), (*rows, *timed), excluded, tuple(limits), next_commands(finished, needs))


def _comparisons_of(needs: Needs) -> list[ScoredComparison]:
    """The comparisons of the task, those of the nearest length first, and those without any last."""
    comparisons = [comparison for comparison in scored_comparisons() if comparison.task == needs.task]
    length = needs.length
    if length is None:
        return comparisons
    return sorted(comparisons, key=lambda comparison: abs(comparison.length - length) if comparison.length else inf)


def _least_minutes(recipe: str, needs: Needs) -> float | None:
    """The shortest measured training of a recipe for the task."""
    cases = [row for comparison in _comparisons_of(needs) for row in comparison.rows if row.recipe == recipe]
    return min((row.minutes for row in cases if row.minutes is not None), default=None)


def _scored_candidates(rows: Sequence[AdviceRow], comparisons: Sequence[ScoredComparison]) -> list[Candidate]:
    """The recipes with a score: those first that none was clearly better than in most comparisons, then by place."""
    by_recipe: dict[str, list[AdviceRow]] = {}
    for row in rows:
        by_recipe.setdefault(row.recipe, []).append(row)
    places = {
        (comparison.of, recipe): place for comparison in comparisons for recipe, place in comparison.places().items()
    }

    def order(recipe: str) -> tuple[int, int]:
        recipe_rows = by_recipe[recipe]
        won = {row.task for row in recipe_rows if row.is_best}
        return -len(won), min(places[row.task, recipe] for row in recipe_rows)

    candidates = []
    for recipe in sorted(by_recipe, key=order)[:MOST_CANDIDATES]:
        # best first, in the order of the comparisons and, within each, the plainest first
        recipe_rows = sorted(by_recipe[recipe], key=lambda row: not row.is_best)
        row = recipe_rows[0]
        rivals = {other.recipe for other in rows if other.task == row.task} - {recipe}
        if not rivals:
            reason = f"the only recipe that was scored on {row.task}"
        elif row.is_best:
            reason = f"no other recipe was clearly better on {row.task}"
        else:
            reason = f"number {places[row.task, recipe]} of {len(rivals) + 1} recipes on {row.task}"
        candidates.append(Candidate(recipe, f"{reason}: {row.value}", row, tuple(recipe_rows)))
    return candidates


def _time_rows(recipes: Sequence[str], length: int | None) -> list[AdviceRow]:
    """The measured training steps at the nearest length, the least first."""
    if length is None:
        return []
    steps = step_times().at(recipes, length)
    ordered = sorted(steps.values(), key=lambda step: step.seconds)
    rows = []
    for step in ordered:
        task = f"training step of {step.length:,} tokens"
        source = "benchmarks/step_costs.py, width 256, 4 layers, the processor's time of one thread"
        row = unscored_row(step.recipe, task, 1e3 * step.seconds, "time (ms)", source)
        rows.append(row._replace(is_best=step is ordered[0]))
    return rows


def _unscored_candidates(
    cards: Mapping[str, CardText], timed: Sequence[AdviceRow], chosen: Sequence[Candidate]
) -> list[Candidate]:
    """The plain recipe, then those of the least time, then one of each family: none of them has a score."""
    names = {candidate.recipe for candidate in chosen}
    candidates = []
    plain = sorted((card for card in cards.values() if card.family == "softmax"), key=lambda card: card.year or 0)
    for card in plain[:1]:
        reason = "plain attention to all tokens, which the others are compared with; no score of it was measured"
        candidates.append(Candidate(card.name, reason, None))
    for number, row in enumerate(timed):
        rank = "the least" if number == 0 else f"number {number + 1} by time"
        reason = f"{rank} of {len(timed)} timed recipes: {row.score:,.0f} ms; no score of it was measured"
        candidates.append(Candidate(row.recipe, reason, None))
    # one of each family before a second one
    for family in FAMILIES:
        members = [card for card in cards.values() if card.family == family]
        for card in sorted(members, key=lambda card: -(card.year or 0)):
            reason = f"{FAMILIES[family]}; its cost is {card.cost}; nothing of it was measured"
            candidates.append(Candidate(card.name, reason, None))
    first: dict[str, Candidate] = {}
    for candidate in candidates:
        first.setdefault(candidate.recipe, candidate)
    return [candidate for name, candidate in first.items() if name not in names]


def _with_evidence(candidate: Candidate, timed: Sequence[AdviceRow], needs: Needs) -> Candidate:
    """The candidate with the rows of its time and of its counted cost, and what its paper says."""
    rows = [*candidate.rows, *(row for row in timed if row.recipe == candidate.recipe)]
    measured = next(iter(rows), None)
    counted = counted_costs().get(candidate.recipe, [])
    if counted:
        cost = min(counted, key=lambda cost: abs(cost.length - (needs.length or cost.length)))
        task = f"counted, a forward pass, {cost.length:,} tokens"
        source = "costs.json of the package, a model with the sizes of its paper"
        row = unscored_row(candidate.recipe, task, cost.flops / 1e9, "operations (G)", source)
        rows.append(row._replace(state_bytes=cost.state_bytes))
    return candidate._replace(rows=tuple(rows), row=measured, published=published_of(candidate.recipe))


def _counted_state(card: CardText, length: int | None) -> int | None:
    """The bytes of the state with the sizes of the paper, None without a state or where they are not known."""
    sizes = {cost.length: cost.state_bytes for cost in counted_costs().get(card.name, [])}
    if length is None:
        return None
    return state_by_growth(sizes, length, grows=card.state == "grows")


def _task_limits(
    needs: Needs, comparisons: Sequence[ScoredComparison], timed: Sequence[AdviceRow], cards: Mapping[str, CardText]
) -> Iterator[str]:
    """What was not measured of the task."""
    scored = {row.recipe for comparison in comparisons for row in comparison.rows}
    unscored = sorted(cards.keys() - scored)
    if not comparisons:
        yield f"no score was measured for {needs.task}: these are chosen by time, growth and family alone"
    elif unscored:
        yield f"no score was measured of {len(unscored)} of {len(cards)} recipes for {needs.task}"
    if comparisons:
        yield "scores of one comparison say nothing about those of another: data, size and time differ"
    lengths = [comparison.length for comparison in comparisons if comparison.length]
    if needs.length is not None and lengths and max(lengths) < needs.length:
        yield f"no score was measured beyond {max(lengths):,} tokens"
    if needs.length is not None and not timed:
        yield f"no training step was timed for {needs.task}"
    elif timed and f"{needs.length:,} tokens" not in timed[0].task:
        yield f"no {needs.length:,} tokens were timed: the nearest is a {timed[0].task}"
    if needs.memory is not None and not any(card.state for card in cards.values()):
        yield "--memory bounds nothing here: these models keep no state"


def _comparison_rows(comparison: ScoredComparison) -> Iterator[AdviceRow]:
    """The rows of a comparison in its order: the plainest first."""
    for row in comparison.rows:
        yield AdviceRow(
            comparison.of,
            _case_name(row),
            row.recipe,
            row.value,
            None,
            comparison.is_best(row),
            None,
            row.keywords,
            comparison.title,
            comparison.source,
            row.spread or None,
        )


def _case_name(row: ScoredRecipe) -> str:
    words = " ".join([row.recipe, *(f"{key}={value}" for key, value in row.keywords.items())])
    return f"{words}, {row.note}" if row.note else words


def unscored_row(recipe: str, task: str, value: float, measure: str, source: str) -> AdviceRow:
    """A row of a time or a count of a recipe with its defaults."""
    return AdviceRow(
        task=task,
        case=recipe,
        recipe=recipe,
        score=value,
        longest_score=None,
        is_best=False,
        state_bytes=None,
        keywords={},
        measure=measure,
        source=source,
    )


def rows_of_recipe(recipe: str, task: str, needs: Needs) -> list[AdviceRow]:
    """The rows of a recipe in comparisons of a task, without those of a GPU unless it is asked for."""
    rows = [
        row for comparison in scored_comparisons() if comparison.task == task for row in _comparison_rows(comparison)
    ]
    other_devices = [name for name in ACCELERATORS if name != needs.device.name]
    return [row for row in rows if row.recipe == recipe and not any(name in row.task.lower() for name in other_devices)]


def _device_rows(needs: Needs) -> list[AdviceRow]:
    """The rows that were measured on the GPU that is asked for."""
    rows = [row for comparison in scored_comparisons() for row in _comparison_rows(comparison)]
    return [row for row in rows if needs.device.name != CPU and needs.device.name in row.task.lower()]


def reason_against(needs: Needs, listed: Any, state: int | None, minutes: float | None) -> str | None:
    """Why a case does not fit, None if it does."""
    if listed is not None and needs.device.kind not in listed.card.backends:
        return f"it does not run on {needs.device.name}"
    if needs.memory is not None and state is None:
        return f"it has no state for decoding at length {needs.length:,}"
    if needs.memory is not None and state is not None and state > needs.memory:
        return f"its state takes {state:,} bytes at length {needs.length:,}"
    if needs.minutes is not None and minutes is not None and minutes > needs.minutes:
        return f"its measured training took {minutes:.1f} minutes"
    return None


def budget_limits(needs: Needs) -> Iterator[str]:
    """What the rows do not say about the budget and the device."""
    if needs.device.name != CPU and not _device_rows(needs):
        yield f"no row was measured on {needs.device.name}: times are those of a CPU; `manyformer plan` counts for it"
    if needs.parameters is not None:
        yield f"no row has {needs.parameters:,} parameters: order and times may be others at that size"


def published_of(recipe: str) -> tuple[str, ...]:
    figures = [figure for figure in published_figures() if figure.recipe == recipe]
    return tuple(f"{figure.measure}: {figure.published} ({figure.source})" for figure in figures)


def next_commands(candidates: Sequence[Candidate], needs: Needs) -> tuple[str, ...]:
    """Commands that measure the candidates here, and that plan the first one."""
    if not candidates:
        return ()
    names = list(dict.fromkeys(candidate.recipe for candidate in candidates))
    commands = [f"manyformer show {names[0]}"]
    if needs.length is not None:
        commands.append(f"manyformer bench {' '.join(names)} --lengths {needs.length}")
    if needs.parameters is not None and needs.device.name in (CPU, *ACCELERATORS):
        length = f" --length {needs.length}" if needs.length else ""
        commands.append(f"manyformer plan {names[0]} --params {needs.parameters}{length} --devices {needs.device.name}")
    return tuple(commands)
