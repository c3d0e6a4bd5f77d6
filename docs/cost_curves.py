"""Curves of what recipes cost by the length of their input, as drawings for pages of the site.

`python docs/cost_curves.py` counts the costs of recipes that costs.json of the package lacks, with names those of
these again.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from manyformer.base.files.atomic_files import atomic_write
from manyformer.config.shipped import COUNTED_COSTS
from manyformer.recipes import RECIPES, get_recipe
from manyformer.recipes.parts.model_summary import forward_cost
from manyformer.recipes.parts.registry import build_on_meta

LENGTHS = (64, 256, 1024)
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 250, 110, 12, 22, 20


class LengthCost(NamedTuple):
    """The operations of one forward pass over `length` tokens, and the bytes of the state after them, if any."""

    length: int
    flops: int
    state_bytes: int | None


def read_costs() -> dict[str, list[LengthCost]]:
    """The counted costs of each recipe."""
    records = json.loads(COUNTED_COSTS.read_text(encoding="utf-8"))
    return {name: [LengthCost(*cost) for cost in costs] for name, costs in records.items()}


def count_costs(name: str) -> list[LengthCost]:
    """The cost of a recipe with default sizes at each length that it can have, as `manyformer show NAME` counts it."""
    parameters = get_recipe(name).signature.parameters
    costs = dict[int, LengthCost]()
    for length in LENGTHS:
        largest = parameters["max_length"].default if "max_length" in parameters else length
        longer = {"max_length": length} if largest and largest < length else {}
        try:
            cost = forward_cost(build_on_meta(name, longer), length)
        except ValueError:
            # the length of images and recordings is fixed, and fixed patterns of mixing allow no other
            continue
        costs[cost.length] = LengthCost(cost.length, cost.flops, cost.state_bytes)
    return list(costs.values())


def main(names: Sequence[str]) -> None:
    """Count the costs of the named recipes, or of those without, and write each at once."""
    for name in names or sorted(RECIPES.keys() - read_costs().keys()):
        records = {**read_costs(), name: count_costs(name)}
        lines = (f'"{name}": {json.dumps(costs)}' for name, costs in sorted(records.items()) if name in RECIPES)
        with atomic_write(COUNTED_COSTS) as file:
            file.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())
        print(name, flush=True)


def drawing(name: str) -> str:
    """SVGs of the operations of a token and, where a state is kept, of its bytes, by length; "" for a fixed length."""
    costs = read_costs().get(name, [])
    if len(costs) < 2:
        return ""
    states = [cost.state_bytes for cost in costs if cost.state_bytes]
    curves = [("FLOPs per token", [cost.flops / cost.length for cost in costs])]
    curves += [("bytes of state", [float(size) for size in states])] if len(states) == len(costs) else []
    lengths = [cost.length for cost in costs]
    return "".join(_panel(title, lengths, values) for title, values in curves)


def _panel(title: str, lengths: Sequence[int], values: Sequence[float]) -> str:
    """One curve with logarithmic axes, a picture of its own so that the second wraps on a phone."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    label = f"{title} {_span(lengths, values)}"
    return f'<svg class="costs" role="img" aria-label="{label}" {size}>{"".join(_marks(title, lengths, values))}</svg>'


def _marks(title: str, lengths: Sequence[int], values: Sequence[float]) -> Iterator[str]:
    room = HEIGHT - TOP - BOTTOM
    # a straight rise by 16, that of the lengths, would fill the height
    rise = [math.log(value / min(values)) / math.log(LENGTHS[-1] / LENGTHS[0]) for value in values]
    step = (WIDTH - 2 * LEFT - 40) / (len(lengths) - 1)
    points = [(LEFT + step * index, HEIGHT - BOTTOM - room * min(part, 1)) for index, part in enumerate(rise)]
    yield f'<text x="{LEFT}" y="12">{title}</text>'
    yield f'<polyline points="{" ".join(f"{x:.0f},{y:.0f}" for x, y in points)}"/>'
    for (x, y), length, value in zip(points, lengths, values, strict=True):
        yield f'<circle cx="{x:.0f}" cy="{y:.0f}" r="2.5"/><text x="{x + 5:.0f}" y="{y - 4:.0f}">{_short(value)}</text>'
        yield f'<text x="{x:.0f}" y="{HEIGHT - 5}">{length:,}</text>'


def _span(lengths: Sequence[int], values: Sequence[float]) -> str:
    return f"{_short(values[0])} at {lengths[0]:,}, {_short(values[-1])} at {lengths[-1]:,} tokens"


def _short(value: float) -> str:
    """A number with three digits and a unit."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


if __name__ == "__main__":
    main(sys.argv[1:])
