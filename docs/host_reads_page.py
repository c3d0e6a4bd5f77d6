"""The page about waits for a GPU: its tables follow from docs/host_reads.json, written by benchmarks/host_reads.py."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from manyformer.base.files.text_tables import markdown_table
from manyformer.recipes import RECIPES

FILE = Path(__file__).with_name("host_reads.json")
COLUMNS = {
    "training": "training step",
    "packed rows": "with packed rows",
    "decoding": "decoded token",
    "static steps": "by a static step",
}

TEXT = """\
# Where a GPU waits for Python

A GPU works through a queue that Python fills ahead of it. Whenever Python needs a number from it (`item`, `tolist`, a
copy to the CPU, a size that depends on data), the queue runs empty: the GPU stalls, and a step cannot be captured as a
graph. Copying numbers that Python has made to the GPU waits as well, unless they are in pinned memory.

These counts are made without a GPU, by a device that tensors of the CPU pretend to be (`tests/pretended_device`): it
takes the branches that CUDA takes, refuses to mix tensors of two devices as CUDA does, and counts each wait with its
place. Nothing is compiled there; a compiled step has the same waits, as graph breaks. A test holds these numbers
exactly, for tiny models of two layers: a training step of the trainer's engine in float32 after one that fills caches,
loss and gradients of rows that hold several documents and padding, whose layout the host has read when it made the
batch, and one token more for two prompts of unequal length. What the trainer reads once in `log.every` steps is not
counted. `python benchmarks/host_reads.py --write` counts again.

## Python's own time

What Python does in a step while a GPU would compute, by `python benchmarks/host_time.py`: eager steps of 2 x 256
tokens, width 64, in bfloat16, without the time within operators. One thread of a machine that others were using, torch
2.13 on a CPU, the least of seven steps; the calls of pretended tensors are in it, so that it is an upper bound. Not
measured on a GPU.

| recipe, 4 layers | operators | host, ms | host, us an operator |
| --- | ---: | ---: | ---: |
| `transformer-lm` | 945 | 27.3 | 29 |
| `llama` | 1,311 | 39.4 | 30 |
| `longformer-lm` | 1,336 | 44.7 | 33 |
| `bert` | 959 | 27.9 | 29 |
| `mixtral` | 2,731 | 74.0 | 27 |
"""


def host_reads_page(mark: str) -> str:
    """Recipes with what they wait for, those that never wait, and each place with its reason."""
    stated: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    names = sorted(RECIPES)
    always = set.intersection(*(set(waits) for waits in stated["decoding"].values()))
    quiet = [name for name in names if not any(set(stated[job].get(name, {})) - always for job in COLUMNS)]
    lines = [mark, TEXT, "## By recipe", ""]
    rows = [
        [f"`{name}`", *(_total(stated[job].get(name, {})) for job in COLUMNS)] for name in names if name not in quiet
    ]
    lines += markdown_table(["recipe", *COLUMNS.values()], rows, right=set(COLUMNS.values()))
    per_token = sum(next(iter(stated["decoding"].values()))[wait] for wait in always)
    lines += [
        "",
        f"Decoding reads chosen tokens back once in 16 tokens, which is {per_token:g} a token and in all numbers. "
        f"Beyond that, {len(quiet)} recipes never wait: {', '.join(f'`{name}`' for name in quiet)}.",
        *("", "## By place", ""),
        *markdown_table(["place", "wait", "recipes", "why"], _places(stated)),
    ]
    return "\n".join(lines) + "\n"


def _total(waits: dict[str, float]) -> str:
    return f"{sum(waits.values()):.4g}" if waits else "0"


def _places(stated: dict[str, Any]) -> Iterator[list[object]]:
    """Each place with its kinds of waits, the number of recipes that wait there, and its reason."""
    recipes: dict[str, set[str]] = defaultdict(set)
    kinds: dict[str, Counter[str]] = defaultdict(Counter)
    for job in COLUMNS:
        for recipe, waits in stated[job].items():
            for wait, number in waits.items():
                place, _, kind = wait.partition(": ")
                recipes[place].add(recipe)
                kinds[place][kind] += number
    for place in sorted(recipes, key=lambda place: (-len(recipes[place]), place)):
        reason = stated["reasons"].get(place) or "not explained yet"
        yield [f"`{place}`", ", ".join(sorted(kinds[place])), len(recipes[place]), reason]
