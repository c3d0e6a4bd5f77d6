"""Keywords of a recipe that give it about a wanted number of parameters."""

from typing import Any

from manyformer.errors import UserError
from manyformer.model_summary import build_on_meta, count_parameters
from manyformer.recipes import get_recipe

HEAD_WIDTH = 64
WIDTHS = [*range(64, 1024, 64), *range(1024, 1 << 15, 128)]


def depth_of(dim: int) -> int:
    """Layers for a width, near those of GPT-3 (Brown et al. 2020, arXiv:2005.14165, table 2.1).

    The width is 64 times the depth at 768 and 128 times at 4096 and beyond.
    """
    ratio: float = min(128.0, max(32.0, 64 * (dim / 768) ** 0.4))
    return max(1, round(dim / ratio))


def keywords_of_size(recipe: str, keywords: dict[str, Any], parameters: int) -> dict[str, Any]:
    """`keywords` with the width, depth and heads for which the number of parameters is nearest to `parameters`.

    Raises UserError for a recipe without these keywords, and where one of them is given already.
    """
    names = get_recipe(recipe).signature.parameters
    if missing := {"dim", "depth"} - names.keys():
        raise UserError(f"{recipe} has no {' and no '.join(sorted(missing))} to be chosen; give its keywords instead")
    if fixed := sorted({"dim", "depth", "heads"} & keywords.keys()):
        raise UserError(f"--params chooses {', '.join(fixed)} itself; give either --params or these keywords")

    def sized(index: int) -> dict[str, Any]:
        dim = WIDTHS[index]
        heads = {"heads": dim // HEAD_WIDTH} if "heads" in names else {}
        return {**keywords, "dim": dim, "depth": depth_of(dim), **heads}

    def count(index: int) -> int:
        return count_parameters(build_on_meta(recipe, sized(index)))

    low, high = 0, len(WIDTHS) - 1
    while low < high:
        middle = (low + high) // 2
        if count(middle) < parameters:
            low = middle + 1
        else:
            high = middle
    if low and parameters - count(low - 1) < count(low) - parameters:
        low -= 1
    return sized(low)
