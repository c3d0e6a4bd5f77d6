"""Draw the parts of the package and which of them import which, from the import statements."""

import ast
from collections import defaultdict
from html import escape
from pathlib import Path

import manyformer

ROOT = Path(manyformer.__file__).parent
BOX_HEIGHT, ROW_HEIGHT, LETTER, WIDTH = 24, 58, 7, 1000


def import_graph() -> dict[str, set[str]]:
    """The other parts (files and folders of the package) that each part imports."""
    graph: dict[str, set[str]] = defaultdict(set)
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        graph[part] |= set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("manyformer."):
                graph[part].add(str(node.module).split(".")[1])
    return {part: imports - {part} for part, imports in graph.items()}


def layers(graph: dict[str, set[str]]) -> list[list[str]]:
    """The parts in rows, each above all that it imports."""
    rows: list[list[str]] = []
    remaining = dict(graph)
    while remaining:
        row = sorted(part for part, imports in remaining.items() if not imports & remaining.keys())
        if not row:
            raise ValueError(f"{sorted(remaining)} import each other")
        rows.append(row)
        remaining = {part: imports for part, imports in remaining.items() if part not in row}
    return rows


def direct_imports(graph: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The imports that no path through another part implies."""
    below: dict[str, set[str]] = {}
    for row in layers(graph):
        for part in row:
            below[part] = graph[part].union(*(below[imported] for imported in graph[part]))
    return [
        (part, imported)
        for part, imports in graph.items()
        for imported in sorted(imports)
        if not any(imported in below[other] for other in imports)
    ]


def draw() -> str:
    """The map as SVG: `cli` at the top, what imports nothing at the bottom; colours follow the page."""
    graph = import_graph()
    rows = _wrap(list(reversed(layers(graph))))
    places = _places(rows)
    height = len(rows) * ROW_HEIGHT + 10
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="Parts of manyformer; each imports from those below it" font-family="monospace" font-size="11">'
    ]
    for part, imported in direct_imports(graph):
        (x, y, w), (to_x, to_y, to_w) = places[part], places[imported]
        lines.append(
            f'<line x1="{x + w / 2}" y1="{y + BOX_HEIGHT}" x2="{to_x + to_w / 2}" y2="{to_y}" stroke="currentColor" '
            'stroke-opacity="0.22"/>'
        )
    for part, (x, y, width) in places.items():
        lines.append(
            f"<g><title>{escape(part)} imports {escape(', '.join(sorted(graph[part])) or 'nothing')}</title>"
            f'<rect x="{x}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="4" fill="var(--pst-color-surface, #eee)" '
            f'stroke="currentColor" stroke-opacity="0.5"/><text x="{x + width / 2}" y="{y + 16}" '
            f'text-anchor="middle" fill="currentColor">{escape(part)}</text></g>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _box_width(part: str) -> int:
    return LETTER * len(part) + 14


def _wrap(rows: list[list[str]]) -> list[list[str]]:
    """The rows, those that are too wide cut in two or more."""
    wrapped: list[list[str]] = []
    for row in rows:
        wrapped.append([])
        for part in row:
            if sum(_box_width(other) + 12 for other in (*wrapped[-1], part)) > WIDTH:
                wrapped.append([])
            wrapped[-1].append(part)
    return wrapped


def _places(rows: list[list[str]]) -> dict[str, tuple[float, float, int]]:
    """The left edge, top edge and width of each part's box; the boxes of a row are spread evenly."""
    places: dict[str, tuple[float, float, int]] = {}
    for number, row in enumerate(rows):
        gap = (WIDTH - sum(map(_box_width, row))) / (len(row) + 1)
        x = gap
        for part in row:
            places[part] = (round(x, 1), number * ROW_HEIGHT + 5, _box_width(part))
            x += _box_width(part) + gap
    return places
