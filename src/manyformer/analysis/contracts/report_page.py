"""A report of a check as one page of HTML, a picture of a leak as SVG, and a badge.

The page needs nothing but itself: no script, no font and no picture from elsewhere, so that it can be attached to a
pull request. Colors are safe for the color-blind, follow the reader's light or dark scheme, and never stand alone.
"""

import importlib.metadata
import platform
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

import torch

from manyformer.analysis.contracts.leak_place import DependenceMatrix, LeakPlace
from manyformer.base.files.json_text import json_text

CELL = 14
"""The side of a cell of the matrix in its own units."""

MARGIN = 46

COLORS = """
  --ground: #ffffff; --text: #1c2430; --quiet: #5b6675; --line: #d5dbe3; --panel: #f5f7fa;
  --kept: #0b6b50; --broken: #b3400a; --open: #6b5a00;
  --actual: #0072b2; --allowed: #dbe9f4; --leak: #d55e00; --mark: #ffffff;
"""

DARK_COLORS = """
  --ground: #14181f; --text: #e6eaf0; --quiet: #9aa6b6; --line: #333c49; --panel: #1c222b;
  --kept: #4fc3a1; --broken: #ff9a62; --open: #e0c860;
  --actual: #56a5dc; --allowed: #24374a; --leak: #ff7f2a; --mark: #14181f;
"""

STYLE = f"""
:root {{ color-scheme: light dark; {COLORS} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK_COLORS} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 3rem; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.5rem; line-height: 1.25; margin: 0 0 .25rem; }}
h2 {{ font-size: 1.125rem; margin: 2rem 0 .5rem; }}
h3 {{ font-size: 1rem; margin: 0; }}
p {{ margin: .25rem 0; }}
.quiet {{ color: var(--quiet); }}
.verdict {{ font-weight: 600; white-space: nowrap; }}
.passed {{ color: var(--kept); }}
.failed {{ color: var(--broken); }}
.not-run {{ color: var(--open); }}
.not-promised {{ color: var(--quiet); }}
ul {{ margin: .25rem 0; padding-left: 1.25rem; }}
section.broken {{ border: 1px solid var(--line); border-left: 4px solid var(--broken); border-radius: 4px;
  padding: .75rem 1rem 1rem; margin: .75rem 0; }}
.finding {{ display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 22rem); gap: .5rem 1.5rem; }}
dl {{ display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .25rem .75rem; margin: .5rem 0; }}
dt {{ color: var(--quiet); }}
dd {{ margin: 0; }}
code, pre {{ font: .8125rem/1.5 ui-monospace, monospace; }}
pre {{ background: var(--panel); border-radius: 4px; padding: .75rem; margin: .5rem 0 0; overflow-x: auto; }}
figure {{ margin: .5rem 0; }}
figure svg {{ width: 100%; height: auto; display: block; }}
figcaption {{ color: var(--quiet); font-size: .8125rem; }}
table {{ border-collapse: collapse; width: 100%; font-size: .875rem; }}
th, td {{ text-align: left; vertical-align: top; border-top: 1px solid var(--line);
  padding: .375rem .75rem .375rem 0; }}
th {{ color: var(--quiet); font-weight: 500; white-space: nowrap; }}
td.number, td.name {{ white-space: nowrap; font-variant-numeric: tabular-nums; }}
@media (max-width: 42rem) {{
  .finding {{ grid-template-columns: minmax(0, 1fr); }}
  thead {{ display: none; }}
  tr {{ display: block; border-top: 1px solid var(--line); padding: .375rem 0; }}
  td {{ display: inline; border: 0; padding: 0 .5rem 0 0; }}
  td:last-child {{ display: block; }}
}}
"""

PICTURE_STYLE = """
.allowed { fill: var(--allowed); } .actual { fill: var(--actual); } .leak { fill: var(--leak); }
.mark { stroke: var(--mark); stroke-width: 1.6; fill: none; }
.frame { fill: none; stroke: var(--line); } .label { fill: var(--quiet); font: 9px system-ui, sans-serif; }
.title { fill: var(--text); font: 10px system-ui, sans-serif; }
"""


class PageRow(NamedTuple):
    """One contract, its numbers as text."""

    contract: str
    verdict: str
    sentence: str
    measured: str
    tolerance: str
    place: LeakPlace | None


class PageContent(NamedTuple):
    """What a page tells: `outcome` in a word or two, `counts` of all verdicts, and the `command` that repeats it."""

    subject: str
    outcome: str
    counts: str
    lengths: str
    assumptions: tuple[str, ...]
    rows: tuple[PageRow, ...]
    command: str
    seed: int


def report_html(content: PageContent) -> str:
    """The whole page."""
    broken = [row for row in content.rows if row.verdict == "failed"]
    style = "failed" if broken else "passed"
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(content.subject)}: {escape(content.outcome)}</title>",
        f"<style>{STYLE}{PICTURE_STYLE}</style>",
        "</head>",
        "<body>",
        "<header>",
        f'<h1>{escape(content.subject)}: <span class="{style}">{escape(content.outcome)}</span></h1>',
        f'<p class="quiet">Contracts of a model, checked {escape(content.lengths)}: {escape(content.counts)}.</p>',
        "</header>",
    ]
    if content.assumptions:
        parts += ["<h2>What was assumed</h2>", "<ul>"]
        parts += [f"<li>{escape(sentence)}</li>" for sentence in content.assumptions]
        parts.append("</ul>")
    if broken:
        parts.append("<h2>Broken contracts</h2>")
        shown: list[LeakPlace] = []
        for row in broken:
            parts += _broken_row(row, shown)
    parts += ["<h2>All contracts</h2>", *_table(content.rows)]
    parts += ["<h2>How to repeat this</h2>", f"<pre><code>{escape(content.command)}</code></pre>"]
    parts.append(f'<p class="quiet">{escape(_versions())}, seed {content.seed}.</p>')
    parts += ["</body>", "</html>", ""]
    return "\n".join(parts)


def _broken_row(row: PageRow, shown: list[LeakPlace]) -> list[str]:
    """A broken contract with its place; a place that was shown already is named, but not drawn again."""
    parts = ['<section class="broken">', f"<h3>{escape(row.contract)}</h3>", f"<p>{escape(row.sentence)}</p>"]
    place = row.place
    if place is not None and place in shown:
        parts.append(f'<p class="quiet">The same place as above: {escape(place.where)}.</p>')
    elif place is not None:
        shown.append(place)
        parts += ['<div class="finding">', "<div>", *_facts(place), *_snippet(place), "</div>"]
        if place.matrix is not None:
            parts += [
                "<figure>",
                matrix_svg(place.matrix),
                f"<figcaption>{escape(_caption(place.matrix))}</figcaption>",
                "</figure>",
            ]
        parts.append("</div>")
    parts.append("</section>")
    return parts


def _snippet(place: LeakPlace) -> list[str]:
    snippet = place.snippet()
    if not snippet:
        return []
    return [
        "<p>The smallest input that shows it, for a function <code>logits</code> of your model:</p>",
        f"<pre><code>{escape(snippet)}</code></pre>",
    ]


def _facts(place: LeakPlace) -> list[str]:
    facts = []
    if place.output is not None:
        facts += [("what", place.what), ("where", place.where)]
    if place.statement is not None:
        facts.append(("first seen", place.statement))
    if place.layers_told is not None:
        facts.append(("layers", f"{place.layers_told}: {', '.join(place.layers[:8])}"))
    facts += [("note", note) for note in place.notes]
    return ["<dl>", *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts), "</dl>"]


def _caption(matrix: DependenceMatrix) -> str:
    cells = len(matrix.leaks)
    bins = f" A cell stands for {matrix.bin_size} positions." if matrix.bin_size > 1 else ""
    noun = "cell, of an output that depends" if cells == 1 else "cells, of outputs that depend"
    return f"Which output changes if a token is exchanged. Crosses mark {cells} {noun} on a later token.{bins}"


def _table(rows: Sequence[PageRow]) -> list[str]:
    names = ("contract", "verdict", "measured", "at most", "result")
    parts = ["<table>", "<thead><tr>", *(f'<th scope="col">{name}</th>' for name in names), "</tr></thead>", "<tbody>"]
    for row in rows:
        style = row.verdict.replace(" ", "-")
        cells = [
            f'<td class="name">{escape(row.contract)}</td>',
            f'<td class="verdict {style}">{escape(row.verdict)}</td>',
            f'<td class="number">{escape(row.measured)}</td>',
            f'<td class="number">{escape(row.tolerance)}</td>',
            f"<td>{escape(row.sentence)}</td>",
        ]
        parts.append(f"<tr>{''.join(cells)}</tr>")
    return [*parts, "</tbody>", "</table>"]


def _versions() -> str:
    versions = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    for package in ("manyformer", "manyformer-check"):
        try:
            versions.insert(0, f"{package} {importlib.metadata.version(package)}")
            break
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(versions)


def matrix_svg(matrix: DependenceMatrix, *, standalone: bool = False) -> str:
    """The matrix as SVG: outputs downward, tokens to the right; a cross marks a leak, whatever the colors show.

    `standalone` gives a file of its own with the colors of both schemes.
    """
    size = len(matrix.rows)
    side = size * CELL
    width = MARGIN + side + 4
    height = MARGIN + side + 26
    label = f"Dependence of {size} outputs on {size} tokens; {len(matrix.leaks)} cells are leaks"
    namespace = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    parts = [
        f'<svg{namespace} viewBox="0 0 {width} {height}" role="img" aria-label="{label}">',
        f"<title>{label}</title>",
    ]
    if standalone:
        dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {DARK_COLORS} }} }}"
        parts.append(f"<style>svg {{ {COLORS} }} {dark} {PICTURE_STYLE} .ground {{ fill: var(--ground); }}</style>")
        parts.append(f'<rect class="ground" width="{width}" height="{height}"/>')
    for output, row in enumerate(matrix.rows):
        for token, depends in enumerate(row):
            parts += _cell(output, token, depends=depends)
    parts.append(f'<rect class="frame" x="{MARGIN}" y="{MARGIN}" width="{side}" height="{side}"/>')
    parts += _labels(matrix)
    parts += _legend(MARGIN + side + 16)
    return "\n".join([*parts, "</svg>"])


def _cell(output: int, token: int, *, depends: bool) -> list[str]:
    x = MARGIN + token * CELL
    y = MARGIN + output * CELL
    leak = depends and token > output
    if leak:
        style = "leak"
    elif depends:
        style = "actual"
    elif token <= output:
        style = "allowed"
    else:
        return []
    square = f'<rect class="{style}" x="{x + 0.5}" y="{y + 0.5}" width="{CELL - 1}" height="{CELL - 1}"/>'
    return [square, _cross(x, y)] if leak else [square]


def _cross(x: int, y: int) -> str:
    low = 4
    high = CELL - 4
    return (
        f'<path class="mark" d="M{x + low} {y + low}L{x + high} {y + high}M{x + high} {y + low}L{x + low} {y + high}"/>'
    )


def _labels(matrix: DependenceMatrix) -> list[str]:
    size = len(matrix.rows)
    middle = MARGIN + size * CELL / 2
    parts = [
        f'<text class="title" x="{middle}" y="12" text-anchor="middle">token that is exchanged</text>',
        f'<text class="title" x="12" y="{middle}" text-anchor="middle" transform="rotate(-90 12 {middle})">'
        "output that changes</text>",
    ]
    # numbers of three digits need the width of two cells
    step = 1 if size <= 16 and matrix.position(size) <= 100 else 4
    for index in range(0, size, step):
        center = MARGIN + index * CELL + CELL / 2
        position = matrix.position(index)
        parts.append(f'<text class="label" x="{center}" y="{MARGIN - 6}" text-anchor="middle">{position}</text>')
        parts.append(f'<text class="label" x="{MARGIN - 6}" y="{center + 3}" text-anchor="end">{position}</text>')
    return parts


def _legend(y: int) -> list[str]:
    parts: list[str] = []
    entries = (("actual", "depends"), ("allowed", "allowed, unused"), ("leak", "leak"))
    x = 4
    for style, text in entries:
        parts.append(f'<rect class="{style}" x="{x}" y="{y - 9}" width="10" height="10"/>')
        if style == "leak":
            parts.append(f'<path class="mark" d="M{x + 2} {y - 7}L{x + 8} {y - 1}M{x + 8} {y - 7}L{x + 2} {y - 1}"/>')
        parts.append(f'<text class="label" x="{x + 14}" y="{y}">{text}</text>')
        x += 24 + 5 * len(text)
    return parts


def badge_json(outcome: str, *, ok: bool) -> str:
    """JSON for the endpoint badge of shields.io."""
    badge = {"schemaVersion": 1, "label": "contracts", "message": outcome, "color": "blue" if ok else "orange"}
    return json_text(badge, ensure_ascii=True)


def badge_svg(outcome: str, *, ok: bool) -> str:
    """A badge of two fields, such as "contracts: kept"."""
    color = "#0072b2" if ok else "#a84300"
    fields = (("contracts", "#444c56"), (outcome, color))
    widths = [12 + 6.4 * len(text) for text, _ in fields]
    total = round(sum(widths))
    label = f"contracts: {outcome}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="20" role="img" aria-label="{label}">',
        f"<title>{label}</title>",
        f'<clipPath id="corners"><rect width="{total}" height="20" rx="3"/></clipPath>',
        '<g clip-path="url(#corners)" font-family="Verdana, DejaVu Sans, sans-serif" font-size="11" fill="#ffffff" '
        'text-anchor="middle">',
    ]
    x = 0.0
    for (text, fill), width in zip(fields, widths, strict=True):
        parts.append(f'<rect x="{x:.1f}" width="{width + 1:.1f}" height="20" fill="{fill}"/>')
        # the length is set, because fonts differ
        parts.append(f'<text x="{x + width / 2:.1f}" y="14" textLength="{width - 12:.1f}">{text}</text>')
        x += width
    return "\n".join([*parts, "</g>", "</svg>", ""])
