"""Draw the house from the import statements: the wings with their rooms, what each imports, and the rooms of `nn`."""

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path

import manyformer

ROOT = Path(manyformer.__file__).parent
LETTER, LINE = 6.7, 16
BOX_WIDTH, TABLE_LEFT, CELL = 510, 530, 24
GAP = "\u00a0\u00a0 "
MOST_FILES = 5
"""The files of a wing with rooms that are named, besides these; more are counted."""
OPEN_WING = "nn"
"""The wing whose rooms are drawn in their order, too."""

Graph = dict[str, set[str]]


def import_graph(folder: Path = ROOT) -> Graph:
    """The other parts (files and folders of `folder`) that each part imports."""
    package = ".".join(["manyformer", *folder.relative_to(ROOT).parts])
    graph: Graph = defaultdict(set)
    for file in folder.rglob("*.py"):
        part = file.relative_to(folder).parts[0].removesuffix(".py")
        if part in ("__init__", "__main__"):
            continue
        graph[part] |= set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
                graph[part].add(str(node.module).removeprefix(f"{package}.").split(".")[0])
    return {part: imports - {part} for part, imports in graph.items()}


def layers(graph: Graph) -> list[list[str]]:
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


def draw() -> str:
    """The map as SVG: `cli` at the top, what imports nothing at the bottom; colors follow the page."""
    graph = import_graph()
    wings = [wing for row in reversed(layers(graph)) for wing in row]
    shapes: list[str] = []
    top = 84.0
    for column, wing in enumerate(wings):
        shapes.append(_upright(wing, TABLE_LEFT + (column + 0.5) * CELL, top - 8))
    for wing in wings:
        height = _draw_wing(shapes, wing, top)
        for column, other in enumerate(wings):
            shapes.append(_cell(wing, other, graph[wing], TABLE_LEFT + column * CELL, top, height))
        top += height + 6
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {TABLE_LEFT + CELL * len(wings)} {top:.0f}" role="img" '
        'aria-label="Wings of manyformer with their rooms; a dot says that the wing of the row imports that of the '
        'column" font-family="monospace" font-size="11">'
    )
    return "\n".join([head, *shapes, "</svg>", ""])


def _draw_wing(shapes: list[str], wing: str, top: float) -> float:
    """Draw a wing as a box with its rooms; returns the height of the box."""
    is_open = wing == OPEN_WING
    lines = list(_room_rows() if is_open else _wrapped(_rooms(ROOT / wing)))
    height = LINE * len(lines) + 12
    files = sum(1 for _ in (ROOT / wing).rglob("*.py"))
    shapes.append(
        f'<g><title>{escape(wing)}: {files} files</title><rect x="2" y="{top}" width="{BOX_WIDTH}" height="{height}" '
        'rx="4" fill="var(--pst-color-surface, #eee)" stroke="currentColor" stroke-opacity="0.5"/>'
        f'<text x="12" y="{top + 18}" font-weight="bold" fill="currentColor">{escape(wing)}/</text></g>'
    )
    for number, line in enumerate(lines):
        y = top + 18 + LINE * number
        shapes.append(f'<text x="112" y="{y}" fill="currentColor">{escape(line)}</text>')
    return height


def _rooms(folder: Path) -> list[str]:
    """The folders of code in a wing, and its files: many of them as their number."""
    rooms = [path.name for path in sorted(folder.iterdir()) if any(path.glob("*.py"))]
    files = [path.stem for path in sorted(folder.glob("[!_]*.py"))]
    if rooms and len(files) > MOST_FILES:
        return [*rooms, f"and {len(files)} files"]
    return [*rooms, *files]


def _room_rows() -> Iterator[str]:
    """The rooms of the open wing, a line for each level, the highest first."""
    for row in reversed(layers(import_graph(ROOT / OPEN_WING))):
        yield from _wrapped(row)


def _wrapped(names: Iterable[str]) -> Iterator[str]:
    """Names in lines that fit into a box."""
    line = ""
    for name in names:
        longer = f"{line}{GAP}{name}" if line else name
        if LETTER * len(longer) > BOX_WIDTH - 120:
            yield line
            line = name
        else:
            line = longer
    yield line


def _upright(wing: str, x: float, y: float) -> str:
    """The name of a column, written upwards."""
    return f'<text transform="translate({x + 4} {y}) rotate(-90)" fill="currentColor">{escape(wing)}</text>'


def _cell(wing: str, other: str, imports: set[str], x: float, y: float, height: float) -> str:
    """A cell of the table: a dot where the wing imports the other one, a square where both are the same."""
    border = (
        f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{height}" fill="none" stroke="currentColor" '
        'stroke-opacity="0.12"/>'
    )
    center_x = x + CELL / 2 - 1
    center_y = y + height / 2
    if wing == other:
        mark = (
            f'<rect x="{center_x - 5}" y="{center_y - 5}" width="10" height="10" fill="currentColor" opacity="0.25"/>'
        )
    elif other in imports:
        mark = f'<circle cx="{center_x}" cy="{center_y}" r="5" fill="currentColor"/>'
    else:
        mark = ""
    verb = "imports" if other in imports else "does not import"
    return f"<g><title>{escape(wing)} {verb} {escape(other)}</title>{border}{mark}</g>"
