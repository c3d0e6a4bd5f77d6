"""The description of recipes for pages of the site."""

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import cache
from html import escape
from itertools import groupby

from cost_curves import drawing

from manyformer.analysis.figures import attention_masks, draw, draw_mixing, mixing_strengths
from manyformer.analysis.figures.mask_pictures import SHADES
from manyformer.analysis.own_models import build_tiny
from manyformer.cli.show_measured import random_inputs
from manyformer.nn.attention.global_summaries import SummaryPrefixedLayer
from manyformer.recipes import RECIPES, Recipe
from manyformer.recipes.parts.model_summary import count_parameters
from manyformer.recipes.parts.registry import FAMILIES, build_on_meta, task_of

PICTURE_LENGTH = 256
"""The tokens of a picture of a mask, in 64 cells on each side."""

CELL = 3
CAPTION = 18
"""The side of a cell of a mask, and the height of the line above it, in pixels."""


def cards(patterns: Iterable[str], root: str) -> Iterator[str]:
    """The cards of the recipes that match the patterns, in their order; `root` leads from the page to docs/."""
    for pattern in patterns:
        names = sorted(name for name in RECIPES if fnmatch(name, pattern))
        if not names:
            raise ValueError(f"no recipe matches '{pattern}'")
        for name in names:
            yield from card(RECIPES[name], root)


def card(recipe: Recipe, root: str) -> Iterator[str]:
    """The lines of a card: the paper, cost and contracts, the number of parameters, the cost by length, and the first
    attention mask or, where no mask decides, how strongly outputs depend on tokens.

    The commands print the same, and more."""
    card = recipe.card
    promises = ", ".join(card.promises) or "none"
    parameters, option, picture = _shown(card.name)
    yield from (
        f"**[{card.name}]({root}recipes/{card.family}.md#{card.name})**: {card.title}. {card.summary} *{card.paper}*",
        "",
    )
    yield from (f"Cost {card.cost}. Parameters: {parameters:,}. Contracts: {promises}.", "")
    commands = [f"manyformer show {card.name} {option}"] * bool(picture)
    yield from ("```", f"manyformer show {card.name}", *commands, f"manyformer bench {card.name}", "```", "")
    if curves := drawing(card.name):
        yield from ("```{raw} html", curves, "```", "")
    if picture:
        yield from ("```{raw} html", mask_drawing(picture, card.name), "```", "")


@cache
def _shown(name: str) -> tuple[int, str, str]:
    """The parameters of a recipe with its defaults, the option of `show` for its picture, and the picture."""
    model = build_on_meta(name, {})
    parameters = count_parameters(model)
    masks = list(attention_masks(model))
    # summaries before the text need a layout of their own, which `show --pattern` has
    if masks and not isinstance(getattr(model, "body", None), SummaryPrefixedLayer):
        picture = draw(masks[0], PICTURE_LENGTH, heads=model.spec.keywords.get("heads", 1))
        return parameters, f"--pattern --length {PICTURE_LENGTH}", picture
    if not task_of(model).per_token:
        return parameters, "", ""
    tiny = build_tiny(name, {}, 0)
    return parameters, "--mixing", draw_mixing(mixing_strengths(tiny, random_inputs(tiny, None)))


def mask_drawing(text: str, name: str) -> str:
    """A mask as `draw` writes it, as SVG: a drawing for each set of heads, darker where a larger share is visible."""
    return "".join(_drawing(part.splitlines(), name) for part in text.split("\n\n"))


def _drawing(lines: list[str], name: str) -> str:
    rows = [line for line in lines if set(line) <= set(SHADES)]
    title = next((line for line in lines if line not in rows), "")
    top = CAPTION if title else 0
    width = CELL * len(rows[0])
    height = top + CELL * len(rows)
    paths: dict[str, list[str]] = {}
    for y, row in enumerate(rows):
        x = 0
        # one rectangle for equal cells beside each other
        for shade, run in groupby(row):
            length = len(list(run))
            paths.setdefault(shade, []).append(f"M{x} {top + CELL * y}h{CELL * length}v{CELL}h-{CELL * length}z")
            x += CELL * length
    label = escape(f"Mask of {name} {title}".strip())
    parts = [f'<svg class="mask" role="img" aria-label="{label}" width="{width}" viewBox="0 0 {width} {height}">']
    if title:
        parts.append(f'<text x="0" y="{CAPTION - 5}">{escape(title)}</text>')
    parts.append(f'<rect y="{top}" width="{width}" height="{height - top}"/>')
    for level, shade in enumerate(SHADES[1:], 1):
        if shade in paths:
            opacity = level / (len(SHADES) - 1)
            parts.append(f'<path fill-opacity="{opacity:g}" d="{"".join(paths[shade])}"/>')
    return "".join([*parts, "</svg>"])


def families() -> dict[str, list[str]]:
    """The names of the recipes of each family, in the order of the families."""
    names = {family: sorted(name for name in RECIPES if RECIPES[name].card.family == family) for family in FAMILIES}
    return {family: members for family, members in names.items() if members}


def index_lines(target: Callable[[Recipe], str]) -> Iterator[str]:
    """Links to all recipes, by task and by family; `target` is the place of one."""
    tasks = dict.fromkeys(RECIPES[name].card.task.name for name in sorted(RECIPES))
    yield from ("", "## By task", "")
    for task in tasks:
        names = sorted(name for name in RECIPES if RECIPES[name].card.task.name == task)
        yield f"- **{task}** ({len(names)}): {_links(names, target)}"
    yield from ("", "## By family", "")
    for family, names in families().items():
        yield f"- **{family}**, {FAMILIES[family]} ({len(names)}): {_links(names, target)}"


def _links(names: Iterable[str], target: Callable[[Recipe], str]) -> str:
    return ", ".join(f"[{name}]({target(RECIPES[name])})" for name in names)


def gallery_pages() -> dict[str, str]:
    """The index of the gallery, and a page of cards for each family."""
    lines = ["# Gallery", "", "Every recipe with its default sizes, and the commands that print what is shown."]
    lines += [
        f"A mask is that of the first layer, for {PICTURE_LENGTH} tokens: queries downwards, keys to the right. Where",
        "no mask decides, the picture shows how strongly each output (downwards) of a tiny model with random weights",
        "depends on each token. Curves have the operations of one forward pass a token and the bytes of the state;",
        "both axes are logarithmic, and the whole height is a rise by that of the lengths.",
    ]
    lines += index_lines(lambda recipe: f"gallery/{recipe.card.family}.md#{recipe.card.name}")
    lines += ["", "```{toctree}", ":hidden:", "", *(f"gallery/{family}" for family in families()), "```", ""]
    pages = {"gallery.md": "\n".join(lines)}
    for family, names in families().items():
        page = [f"# Gallery: {FAMILIES[family]}", "", "[All recipes](../gallery.md)"]
        for name in names:
            page += ["", f"## {name}", "", "```{recipe-cards}", name, "```"]
        pages[f"gallery/{family}.md"] = "\n".join([*page, ""])
    return pages
