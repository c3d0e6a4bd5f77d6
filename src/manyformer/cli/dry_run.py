"""What a run would do, for `--dry-run`: the model that it makes."""

from collections.abc import Iterable
from typing import Any

from manyformer.cli.console import format_count, print_result
from manyformer.config import ImagesData, RunConfig, SyntheticData, longest_row
from manyformer.model_summary import build_on_meta, count_parameters, forward_cost, module_rows
from manyformer.recipes import get_recipe

SPECIALS = 5
"""Ids that every vocabulary has besides its own: padding, beginning, end, unknown, mask."""

LETTERS = 256
"""Stands for the vocabulary of a character model, whose size nobody knows before the data is read."""

WORDS = 10_000
"""The same for a model of words."""

SIDE = 28
"""Height and width of images that are not read yet: those of MNIST."""

CLASSES = 10
"""The number of their labels."""


def print_summary(run: RunConfig) -> None:
    """The model as comments, so that what `--dry-run` prints is a run file still."""
    recipe = get_recipe(run.recipe)
    decided, why = _decided(run)
    model = build_on_meta(run.recipe, {**run.model, **decided})
    print_result()
    print_result(f"# {recipe.card.title}: {count_parameters(model):,} parameters ({why})")
    for part in module_rows(model):
        if part.level < 2 and part.parameters:
            times = f" x {part.times}" if part.times > 1 else ""
            print_result(f"#   {'  ' * part.level}{part.name}{times} {part.kind}: {part.parameters:,}")
    length = _values(run.data) if isinstance(run.data, ImagesData) else longest_row(run.data)
    step = 3 * forward_cost(model, length).flops * run.batch.tokens * run.batch.accumulate / length
    print_result(f"# a step: {run.batch.tokens * run.batch.accumulate:,} tokens, about {format_count(step)}FLOP")
    print_result("# nothing was trained; without --dry-run it is")


def _values(data: ImagesData) -> int:
    """Numbers in an image."""
    size = data.size or SIDE
    return size * size * (data.channels or 1)


def _images(data: ImagesData, known: Iterable[str]) -> tuple[dict[str, Any], str]:
    """The same for images, whose size and labels are in their files."""
    size = data.size or SIDE
    decided = {"height": size, "width": size, "channels": data.channels or 1, "vocab": data.levels + SPECIALS}
    rows, columns = data.block or (1, size)
    decided |= {"classes": CLASSES, "max_length": _values(data), "rows": rows, "columns": columns}
    colours = "grey" if decided["channels"] == 1 else "coloured"
    told = f"as if for {colours} images of {size} x {size} with {CLASSES} labels"
    return {name: value for name, value in decided.items() if name in known}, f"{told}; the data decides"


def _decided(run: RunConfig) -> tuple[dict[str, Any], str]:
    """The keywords that the data will decide, as far as that is known without reading it."""
    decided: dict[str, Any] = {}
    if isinstance(run.data, ImagesData):
        return _images(run.data, get_recipe(run.recipe).signature.parameters)
    if "max_length" in get_recipe(run.recipe).signature.parameters and "max_length" not in run.model:
        decided["max_length"] = longest_row(run.data)
    if isinstance(run.data, SyntheticData):
        return {**decided, "vocab": run.data.symbols + SPECIALS}, f"{run.data.symbols} symbols"
    if run.data.tokenizer == "byte":
        return {**decided, "vocab": 256 + SPECIALS}, "bytes"
    if run.data.vocab is not None:
        return {**decided, "vocab": run.data.vocab}, f"vocabulary {run.data.vocab}, or less where the text is short"
    if run.data.tokenizer == "word":
        return {**decided, "vocab": WORDS}, f"as if there were {WORDS:,} different words; the data decides"
    return {**decided, "vocab": LETTERS}, f"as if there were {LETTERS} different characters; the data decides"
