"""The page of `gpu.py`: failures first, then a table for each part."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpu_parts.kept_results import KeptItem


def page(machine: Mapping[str, Any], items: Mapping[str, KeptItem], remaining: Sequence[str]) -> str:
    """Markdown with all items; `remaining` are those that have not been run."""
    return "\n".join([*_head(machine, items, remaining), *_failures(items), *_parts(items)]) + "\n"


def _head(machine: Mapping[str, Any], items: Mapping[str, KeptItem], remaining: Sequence[str]) -> Iterator[str]:
    facts = ", ".join(f"{name} {value}" for name, value in machine.items() if value not in (None, False, True))
    yield f"# manyformer on {machine['device']}\n"
    if machine["rehearsal"]:
        yield "**A rehearsal with tiny sizes: it tests the script, and its numbers mean nothing.**\n"
    verdicts = [item.verdict for item in items.values()]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in ("passed", "failed", "not run"))
    commits = ", ".join(sorted({item.commit for item in items.values() if item.commit}))
    yield f"{facts}; commit {commits or 'unknown'}. {counts}; {len(remaining)} still to be run.\n"


def _failures(items: Mapping[str, KeptItem]) -> Iterator[str]:
    failed = {name: item for name, item in items.items() if item.verdict == "failed"}
    if failed:
        yield "## Failed\n"
        yield from (f"- `{name}`: {_cell(item.sentence)}" for name, item in failed.items())
        yield ""


def _parts(items: Mapping[str, KeptItem]) -> Iterator[str]:
    for part in dict.fromkeys(name.partition("/")[0] for name in items):
        yield f"## {part}\n"
        yield "| item | verdict | result | numbers | paths | s |"
        yield "|---|---|---|---|---|---|"
        for name, item in items.items():
            if name.startswith(f"{part}/"):
                numbers = ", ".join(f"{key} {value:.4g}" for key, value in item.numbers.items())
                cells = (name.partition("/")[2], item.verdict, item.sentence, numbers, "; ".join(item.paths))
                yield f"| {' | '.join(map(_cell, cells))} | {item.seconds:.1f} |"
        yield ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
