"""The summary of a run's model for `--dry-run`."""

from collections.abc import Iterable
from typing import Any

from manyformer.cli.console import format_count, print_result
from manyformer.config import ImagesData, RunConfig, SyntheticData, longest_row
from manyformer.model_summary import build_on_meta, count_parameters, forward_cost, module_rows
from manyformer.recipes import get_recipe

SPECIALS = 5
"""Special token ids of every vocabulary: padding, beginning, end, unknown, mask."""

CHARACTERS = 256
"""The assumed vocabulary size of a character model, unknown until the data is read."""

WORDS = 10_000
"""The assumed vocabulary size of a word model."""

IMAGE_SIZE = 28
"""The assumed height and width of images, unknown until the data is read: those of MNIST."""

CLASSES = 10
"""The assumed number of image labels."""


def print_summary(run: RunConfig) -> None:
    """Print the model as comments, so that the output of `--dry-run` is still a run file."""
    recipe = get_recipe(run.recipe)
    keywords, assumption = _data_keywords(run)
    model = build_on_meta(run.recipe, {**run.model, **keywords})
    print_result()
    print_result(f"# {recipe.card.title}: {count_parameters(model):,} parameters ({assumption})")
    for part in module_rows(model):
        if part.level < 2 and part.parameters:
            times = f" x {part.times}" if part.times > 1 else ""
            print_result(f"#   {'  ' * part.level}{part.name}{times} {part.kind}: {part.parameters:,}")
    length = _count_values(run.data) if isinstance(run.data, ImagesData) else longest_row(run.data)
    step = 3 * forward_cost(model, length).flops * run.batch.tokens * run.batch.accumulate / length
    print_result(f"# a step: {run.batch.tokens * run.batch.accumulate:,} tokens, about {format_count(step)}FLOP")
    print_result("# nothing was trained: this was --dry-run")


def _count_values(data: ImagesData) -> int:
    """The number of values in an image."""
    size = data.size or IMAGE_SIZE
    return size * size * (data.channels or 1)


def _image_keywords(data: ImagesData, parameters: Iterable[str]) -> tuple[dict[str, Any], str]:
    """Assumed keywords for image data, whose sizes and labels are in the files, and a description of the assumption."""
    size = data.size or IMAGE_SIZE
    keywords = {"height": size, "width": size, "channels": data.channels or 1, "vocab": data.levels + SPECIALS}
    rows, columns = data.block or (1, size)
    keywords |= {"classes": CLASSES, "max_length": _count_values(data), "block_height": rows, "block_width": columns}
    colors = "grayscale" if keywords["channels"] == 1 else "color"
    assumption = f"as if for {colors} images of {size} x {size} with {CLASSES} labels"
    return {name: value for name, value in keywords.items() if name in parameters}, f"{assumption}; the data decides"


def _data_keywords(run: RunConfig) -> tuple[dict[str, Any], str]:
    """The keywords that the data will decide, assumed where unknown without reading it, and a description."""
    keywords: dict[str, Any] = {}
    if isinstance(run.data, ImagesData):
        return _image_keywords(run.data, get_recipe(run.recipe).signature.parameters)
    if "max_length" in get_recipe(run.recipe).signature.parameters and "max_length" not in run.model:
        keywords["max_length"] = longest_row(run.data)
    if isinstance(run.data, SyntheticData):
        return {**keywords, "vocab": run.data.symbols + SPECIALS}, f"{run.data.symbols} symbols"
    if run.data.tokenizer == "byte":
        return {**keywords, "vocab": 256 + SPECIALS}, "bytes"
    if run.data.vocab is not None:
        return {**keywords, "vocab": run.data.vocab}, f"vocabulary {run.data.vocab}, or less where the text is short"
    if run.data.tokenizer == "word":
        return {**keywords, "vocab": WORDS}, f"as if there were {WORDS:,} different words; the data decides"
    return {**keywords, "vocab": CHARACTERS}, f"as if there were {CHARACTERS} different characters; the data decides"
