"""`manyformer list`: all recipes; `manyformer show NAME`: the description, modules and cost of one."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Argument, Option

from manyformer.base.errors import UserError, suggest_names
from manyformer.base.files.text_tables import aligned_table
from manyformer.base.plugins import is_external
from manyformer.cli.app import FIND, command
from manyformer.cli.console import Block, Note, Output
from manyformer.cli.model_arguments import model_of
from manyformer.cli.options import KeywordsArgument, complete_models, complete_recipes
from manyformer.config.published_sizes import PUBLISHED_SIZES, nearest_recipe, published_size
from manyformer.recipes.parts.cards import FAMILIES, PROMISES, ListedRecipe, listed_recipes

if TYPE_CHECKING:
    from manyformer.models import Model
    from manyformer.nn.core import PrefixedLayout
    from manyformer.nn.masks import Mask
    from manyformer.recipes import Recipe
    from manyformer.recipes.parts.model_summary import ForwardCost


PIPED_WIDTH = 400
"""The width of the list if the output is not a terminal: rows stay whole."""
MIN_TITLE = 12
"""The least width of a title that is still worth its column."""

SCREEN = 45
"""The most recipes that are shown with a line each unless all are asked for."""

STATES = ("constant", "grows")
YEARS = re.compile(r"(?P<first>[0-9]{4})(?P<dash>-(?P<last>[0-9]{4})?)?")


@command(
    FIND,
    "manyformer list",
    "manyformer list linear",
    "manyformer list --task language-model --state constant",
    "manyformer list --family experts --json",
    'manyformer list "*classifier*" --year 2021',
    name="list",
)
def list_recipes(
    text: Annotated[
        str | None,
        Argument(
            help="Part of a recipe's name, title or summary, or a pattern with * and ? for names.",
            autocompletion=complete_recipes,
        ),
    ] = None,
    *,
    task: Annotated[
        str | None,
        Option(
            help="Only this task: language-model, image-generation, translation, masked-lm, classification, tagging "
            "or image-classification."
        ),
    ] = None,
    family: Annotated[
        str | None, Option(help="Only this family: softmax, sparse, linear, memory, experts, ...; the list shows all.")
    ] = None,
    state: Annotated[
        str | None,
        Option(help="Only those whose memory of a text is constant when they generate, or grows with its length."),
    ] = None,
    year: Annotated[str | None, Option(help="Only papers of this year, or of years as in 2020-2022 or 2024-.")] = None,
    show_all: Annotated[bool, Option("--all", help="One line for each recipe instead of the names by family.")] = False,
) -> Output:
    """Find a recipe: the names by family, or one line for each where a text or an option selects a screen of them.

    'manyformer show NAME' describes one; 'manyformer check' tests what it promises. Names of published sizes, such as
    gpt2 or bert-base, stand for a recipe with those sizes wherever a recipe is named.
    """
    selected = _select_recipes(text, RecipeFilters(task, family, state, year))
    # pipes get whole rows, which scripts read by line
    if show_all or len(selected) <= SCREEN or not sys.stdout.isatty():
        page = _line_page(selected)
    else:
        page = _family_page(selected)
    return Output([_card_record(recipe) for recipe in selected], page)


def _by_family(selected: list[ListedRecipe]) -> Iterator[tuple[str, str, list[ListedRecipe]]]:
    """The families with their meanings and those of the recipes that belong to them, without empty ones."""
    for family, meaning in FAMILIES.items():
        members = [recipe for recipe in selected if recipe.card.family == family]
        if members:
            yield family, meaning, members


def _family_page(selected: list[ListedRecipe]) -> Iterator[Block]:
    """The names of each family in a paragraph, all within a screen."""
    width = shutil.get_terminal_size().columns
    for family, meaning, members in _by_family(selected):
        names = textwrap.fill(
            ", ".join(recipe.card.name for recipe in members),
            width,
            initial_indent="  ",
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        yield f"{family}: {meaning} ({len(members)})\n{names}"
    yield textwrap.fill(
        f"published sizes: {', '.join(PUBLISHED_SIZES)}", width, subsequent_indent="  ", break_on_hyphens=False
    )
    yield (
        "\n`manyformer list linear` (any text), `--task translation`, `--family experts`,\n"
        "`--state constant`, `--year 2024-` or `--all` show a line for each;\n"
        "`manyformer show NAME` describes one, `manyformer train NAME` trains it."
    )


def _line_page(selected: list[ListedRecipe]) -> Iterator[Block]:
    """A line for each recipe: name, year, task, memory of the text when it generates, and as much title as fits."""
    order = list(FAMILIES)
    ordered = sorted(selected, key=lambda recipe: (order.index(recipe.card.family), recipe.card.name))
    width = screen_width()
    rows = [("recipe", "year", "family", "task", "state")]
    for recipe in ordered:
        card = recipe.card
        rows.append((card.name, str(card.year or ""), card.family, card.task.name, card.state or ""))
    titles = ["title", *(_title(recipe) for recipe in ordered)]
    lines = list(aligned_table([(*row, title) for row, title in zip(rows, titles)]))
    before_title = max(map(len, aligned_table(rows))) + 2
    if width - before_title < MIN_TITLE:
        lines = list(aligned_table(rows))
    yield "\n".join(line[:width].rstrip() for line in lines)
    advice = "`manyformer show NAME` describes one, `manyformer train NAME` trains it."
    # scripts read rows alone
    if sys.stdout.isatty():
        yield f"\n{advice}"
    else:
        yield Note(advice)


def screen_width() -> int:
    """The columns of the terminal; more where the output is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPED_WIDTH


def _title(recipe: ListedRecipe) -> str:
    # recipes of other packages name their module, so that nobody looks for them here
    if is_external(recipe.module):
        return f"{recipe.card.title} (in {recipe.module})"
    return recipe.card.title


def _card_record(recipe: "ListedRecipe | Recipe") -> dict[str, Any]:
    """The card of a recipe, and the module that defines it, as a JSON record."""
    card = recipe.card
    return {
        **asdict(card),
        "task": card.task.name,
        "year": card.year,
        "state": card.state,
        "promises": card.promises,
        **{name: name in card.promises for name in PROMISES},
        "module": recipe.module,
    }


class RecipeFilters(NamedTuple):
    """What selects recipes beside a text; None selects all."""

    task: str | None = None
    family: str | None = None
    state: str | None = None
    year: str | None = None

    def check(self) -> None:
        """Raise UserError for a value that no recipe can have."""
        task_names = {listed.card.task.name for listed in listed_recipes().values()}
        if self.task is not None and self.task not in task_names:
            from manyformer.models.tasks import task_named

            task_named(self.task)
        if self.family is not None and self.family not in FAMILIES:
            raise UserError(f"there is no family '{self.family}'; {suggest_names(self.family, FAMILIES)}")
        if self.state is not None and self.state not in STATES:
            raise UserError(f"--state ({self.state}) must be {' or '.join(STATES)}")
        self.years()

    def years(self) -> range:
        """The years that are selected. Raises UserError."""
        if self.year is None:
            return range(10_000)
        match = YEARS.fullmatch(self.year)
        if match is None:
            raise UserError(f"--year ({self.year}) must be a year or years, such as 2021, 2020-2022 or 2024-")
        first = int(match["first"])
        if not match["dash"]:
            return range(first, first + 1)
        return range(first, int(match["last"] or 9_999) + 1)

    def select(self, recipe: ListedRecipe) -> bool:
        """Whether a recipe has all that is asked for."""
        card = recipe.card
        return (
            self.task in (None, card.task.name)
            and self.family in (None, card.family)
            and self.state in (None, card.state)
            and (self.year is None or (card.year is not None and card.year in self.years()))
        )

    def __str__(self) -> str:
        """The options as they were given."""
        return " ".join(f"--{name} {value}" for name, value in self._asdict().items() if value is not None)


def _select_recipes(text: str | None, filters: RecipeFilters) -> list[ListedRecipe]:
    filters.check()
    among = [recipe for recipe in listed_recipes().values() if filters.select(recipe)]
    if text is None:
        matching = among
    else:
        matching = [recipe for recipe in among if _matches_recipe(text, recipe)]
    if not matching and text is not None and (size := published_size(text)) is not None:
        matching = [recipe for recipe in among if recipe.card.name == size.recipe]
    if not matching:
        conditions = [str(filters)] if str(filters) else []
        if text is not None:
            names = [recipe.card.name for recipe in among]
            hint = nearest_recipe(text) or (suggest_names(text, names) if names else "leave an option out")
            raise UserError(f"no recipe matches {' '.join([repr(text), *conditions])}; {hint}")
        raise UserError(f"no recipe matches {filters}; leave one of them out")
    return matching


def _matches_recipe(text: str, recipe: ListedRecipe) -> bool:
    # a pattern is for names alone; plain words are found in titles and summaries, too
    if any(sign in text for sign in "*?["):
        return fnmatch(recipe.card.name, text)
    searched = f"{recipe.card.name} {recipe.card.title} {recipe.card.summary} {recipe.card.family}".lower()
    return text.lower() in searched


PATTERN_LENGTH = 64
"""The default length of a mask pattern in tokens."""


@command(
    FIND,
    "manyformer show transformer",
    "manyformer show transformer-lm dim=256 depth=4 --length 4096",
    "manyformer show runs/lm-stdlib",
    "manyformer show longformer --pattern --length 1024 --out pattern.png",
    "manyformer show performer --properties",
    "manyformer show reformer --mixing --out mixing.png",
    accepts_settings=True,
)
def show(
    name: Annotated[
        str, Argument(help="A recipe, or the folder of a run or a saved model.", autocompletion=complete_models)
    ],
    keywords: KeywordsArgument = None,
    *,
    length: Annotated[int | None, Option(min=2, help="Length in tokens for the cost; 512 unless given.")] = None,
    pattern: Annotated[bool, Option("--pattern", help="Draw the attention mask instead.")] = False,
    draw_all: Annotated[
        bool,
        Option("--all", help="Everything instead of a screen; with --pattern the masks of all layers, not the first."),
    ] = False,
    properties: Annotated[
        bool, Option("--properties", help="Measure properties of its attention instead: convex hull, symmetries, rank.")
    ] = False,
    mixing: Annotated[
        bool, Option("--mixing", help="Draw how strongly each output depends on each token instead, as measured.")
    ] = False,
    out: Annotated[
        Path | None, Option(help="With --pattern or --mixing: also write a picture, .png, .svg or .pdf.")
    ] = None,
) -> Output:
    """Describe a recipe within a screen: summary, paper, contracts, keywords, modules with parameters, cost.

    Weights are not allocated, so models of any size are shown at once. Where the cost depends on the tokens, as with
    experts and hashing, the model is built and run instead.
    """
    recipe, model_keywords = model_of(name, keywords)
    _check_views({"--pattern": pattern, "--properties": properties, "--mixing": mixing}, draw_all=draw_all, out=out)
    if properties or mixing:
        from manyformer.cli.show_measured import measured_mixing, measured_properties

        if mixing:
            return measured_mixing(name, recipe, keywords, length, out)
        return measured_properties(name, recipe, keywords, length)
    from manyformer.cli.show_pages import recipe_page, recipe_screen
    from manyformer.recipes.parts.registry import build_on_meta

    model = build_on_meta(recipe.card.name, model_keywords)
    if pattern:
        return _pattern(model, length or PATTERN_LENGTH, out, draw_all=draw_all)
    cost = _cost(model, length)
    page = recipe_page(recipe, model, cost) if draw_all else recipe_screen(recipe, model, cost, screen_width())
    return Output(_recipe_record(recipe, model, cost), page)


def _check_views(views: dict[str, bool], *, draw_all: bool, out: Path | None) -> None:
    """Raise UserError for options that contradict one another or that would be ignored."""
    chosen = [option for option, is_chosen in views.items() if is_chosen]
    if len(chosen) > 1:
        raise UserError(f"give either {' or '.join(chosen)}, not both")
    if draw_all and chosen not in ([], ["--pattern"]):
        raise UserError(f"--all is for --pattern and for the description, not for {chosen[0]}")
    if out and chosen not in (["--pattern"], ["--mixing"]):
        raise UserError("--out is for --pattern and --mixing")


def _pattern(model: "Model", length: int, out: Path | None, *, draw_all: bool) -> Output:
    """The attention masks of a model. Raises UserError if it has none."""
    from manyformer.analysis.figures import attention_masks

    masks = attention_masks(model)
    if not masks:
        raise UserError("no module of this model has an attention mask, so there is no pattern to draw")
    value = [{"mask": repr(mask), "modules": names} for mask, names in masks.items()]
    # pictures are written whether the page is printed or not
    return Output(value, list(_pattern_page(model, masks, length, out, draw_all=draw_all)))


def _pattern_page(
    model: "Model", masks: "Mapping[Mask, Sequence[str]]", length: int, out: Path | None, *, draw_all: bool
) -> Iterator[Block]:
    """The first mask, or all, with a list of those that are not drawn; a file is written for each of them."""
    from manyformer.analysis.figures import draw

    heads = model.spec.keywords.get("heads", 1)
    layout, summary_note = _summaries(model, length)
    length += 0 if layout is None else layout.prefix
    for number, (mask, names) in enumerate(masks.items()):
        if out is None or len(masks) == 1:
            path = out
        else:
            path = out.with_stem(f"{out.stem}-{number + 1}")
        others_note = ""
        if len(names) > 1:
            others_note = f" and {len(names) - 1} more"
        axes_note = f"{summary_note}{length} tokens, queries downwards, keys to the right"
        picture = ""
        if path or draw_all or not number:
            picture = draw(mask, length, heads=heads, path=path, layout=layout)
        # a model may have dozens of masks, and a picture of each would hide the first
        if draw_all or not number:
            yield f"{mask!r}\n{names[0]}{others_note}, {axes_note}\n{picture}\n"
        else:
            yield Note(f"{names[0]}{others_note}: {mask!r}; --all draws it")
        if path is not None:
            yield Note(f"wrote {path}")


def _summaries(model: "Model", length: int) -> "tuple[PrefixedLayout | None, str]":
    """The layout with summary tokens before a text of this length (None without summaries), and a note about it."""
    summary_tokens = getattr(model, "summary_tokens", None)
    if summary_tokens is None:
        return None, ""
    layout = summary_tokens.layout(length)
    return layout, f"the first {layout.prefix} summaries, "


def _cost(model: "Model", length: int | None) -> "ForwardCost":
    from manyformer.recipes.parts.model_summary import forward_cost

    default_length = 512
    if model.max_length is not None:
        default_length = min(512, model.max_length)
    return forward_cost(model, default_length if length is None else length)


def _recipe_record(recipe: "Recipe", model: "Model", cost: "ForwardCost") -> dict[str, Any]:
    from manyformer.base.keyword_checks import describe_keywords
    from manyformer.recipes.parts.model_summary import count_parameters, module_rows

    values = model.spec.keywords
    keywords = describe_keywords(recipe.signature)
    return {
        **_card_record(recipe),
        "doc": recipe.build.__doc__,
        "keywords": [{**keyword._asdict(), "value": values[keyword.name]} for keyword in keywords],
        "parameters": count_parameters(model),
        "modules": module_rows(model),
        "at_length": cost,
    }
