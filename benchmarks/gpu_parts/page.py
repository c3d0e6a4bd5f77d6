"""The page of `gpu.py`: failures first, then each part, of one machine or of several.

A part with many items is a comparison of all recipes: how many passed, the largest numbers, and why some were not run.
The others are tables with every number. The JSON beside the page has each item.
"""

import math
from collections.abc import Iterator, Sequence

from gpu_parts.kept_results import KeptItem, MachineResults

MOST_ROWS = 20
"""A part of more items is summed up."""
LARGEST = 3
"""How many of the largest values of a number are named."""


def page(results: Sequence[MachineResults], remaining: Sequence[str]) -> str:
    """Markdown about all items; `remaining` are those that have not been run."""
    lines = [*_head(results, remaining), *_failures(results), *_parts(results)]
    return "\n".join(lines).rstrip("\n") + "\n"


def _head(results: Sequence[MachineResults], remaining: Sequence[str]) -> Iterator[str]:
    yield f"# manyformer on {', '.join(dict.fromkeys(str(each.machine['device']) for each in results))}\n"
    if any(each.machine["rehearsal"] for each in results):
        yield "**A rehearsal with tiny sizes: it tests the script, and its numbers mean nothing.**\n"
    for each in results:
        facts = ", ".join(f"{name} {value}" for name, value in each.machine.items() if value not in (None, False, True))
        commits = ", ".join(sorted({item.commit for item in each.items.values() if item.commit}))
        days = ", ".join(sorted({item.date[:10] for item in each.items.values()}))
        yield f"{facts}; commit {commits or 'unknown'}; {days}. {_counts(list(each.items.values()))}.\n"
    if remaining:
        yield f"{len(remaining)} are still to be run.\n"


def _counts(items: Sequence[KeptItem]) -> str:
    verdicts = [item.verdict for item in items]
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("passed", "failed", "not run"))


def _failures(results: Sequence[MachineResults]) -> Iterator[str]:
    failed = [
        f"- `{name}`{_on(each, results)}, commit {item.commit or 'unknown'}, {item.date}: {_cell(item.sentence)}"
        for each in results
        for name, item in each.items.items()
        if item.verdict == "failed"
    ]
    if failed:
        yield "## Failed\n"
        yield from failed
        yield ""


def _parts(results: Sequence[MachineResults]) -> Iterator[str]:
    for part in dict.fromkeys(name.partition("/")[0] for each in results for name in each.items):
        yield f"## {part}\n"
        for each in results:
            items = {
                name.partition("/")[2]: item for name, item in each.items.items() if name.partition("/")[0] == part
            }
            if len(items) > MOST_ROWS:
                yield from _summary(items, _on(each, results))
        rows = [row for each in results for row in _rows(each, part, _on(each, results))]
        if rows:
            yield "| item | verdict | result | numbers | paths | s |"
            yield "|---|---|---|---|---|---|"
            yield from rows
            yield ""


def _rows(each: MachineResults, part: str, where: str) -> list[str]:
    items = {name: item for name, item in each.items.items() if name.partition("/")[0] == part}
    if len(items) > MOST_ROWS:
        return []
    rows = []
    for name, item in items.items():
        numbers = ", ".join(f"{key} {value:.4g}" for key, value in item.numbers.items())
        cells = (f"{name.partition('/')[2]}{where}", item.verdict, item.sentence, numbers, "; ".join(item.paths))
        rows.append(f"| {' | '.join(map(_cell, cells))} | {item.seconds:.1f} |")
    return rows


def _summary(items: dict[str, KeptItem], where: str) -> Iterator[str]:
    """How many passed, the largest numbers of those that did, and the reasons of those that were not run."""
    yield f"{_counts(list(items.values()))}{where}.\n"
    passed = {name: item for name, item in items.items() if item.verdict == "passed"}
    for number in dict.fromkeys(number for item in passed.values() for number in item.numbers):
        values = {name: item.numbers[number] for name, item in passed.items() if number in item.numbers}
        largest = sorted(values, key=lambda name: -values[name] if math.isfinite(values[name]) else -math.inf)[:LARGEST]
        named = ", ".join(f"{values[name]:.3g} ({name})" for name in largest if values[name])
        yield f"- {number}: at most {named}" if named else f"- {number}: 0 everywhere"
    reasons: dict[str, list[str]] = {}
    for name, item in items.items():
        if item.verdict == "not run":
            reasons.setdefault(item.sentence, []).append(name)
    for reason, names in reasons.items():
        yield f"- not run, {_cell(reason)}: {', '.join(names)}"
    yield ""


def _on(one: MachineResults, results: Sequence[MachineResults]) -> str:
    """Which machine, where there are several."""
    return f" on {one.machine['device']}, torch {one.machine['torch']}" if len(results) > 1 else ""


def _cell(text: str) -> str:
    # messages of compilers hold what Markdown would read as cells, lines and links
    return text.replace("|", "\\|").replace("\n", " ").replace("](", "] (")
