"""Pictures of masks: who may look at whom, as a drawing and as text for the terminal."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.core import ContiguousLayout, PrefixedLayout
from manyformer.errors import UserError
from manyformer.kernels import Kernel
from manyformer.masks import Mask
from manyformer.ops.static_layout import materialize
from manyformer.view.figures import check_picture, write_picture

CELLS = 64
"""A text has at most this many cells on a side; each then stands for several positions."""

LONGEST = 8192
"""A drawing looks at every pair."""

SHADES = "·░▒▓█"
"""Cells of which nothing, up to a third, to two thirds, more, and all is visible."""

PICTURES = 4
"""Heads that differ are drawn beside each other, this many at most."""


class MaskView(NamedTuple):
    """The heads that see the same, and the share of each cell that they see."""

    heads: tuple[int, ...]
    cells: Float[Tensor, "c c"]


def draw(
    mask: Mask,
    length: int,
    *,
    heads: int = 1,
    path: str | Path | None = None,
    layout: ContiguousLayout | PrefixedLayout | None = None,
) -> str:
    """`mask` for `length` tokens as text, queries from top to bottom and keys from left to right.

    They are one document, unless `layout` says that summaries come first. With `path` it is drawn there, too: PNG, SVG
    or PDF. Heads that differ are shown beside each other. Raises UserError for a length beyond 8192 and for other
    formats.
    """
    if not 1 <= length <= LONGEST:
        raise UserError(f"length ({length}) must be between 1 and {LONGEST}: every pair is looked at")
    if path is not None:
        check_picture(Path(path))
    views = list(_views(mask, length, heads, layout or ContiguousLayout()))
    if path is not None:
        _paint(mask, length, views, Path(path))
    return "\n\n".join("\n".join(_text(view, several=len(views) > 1)) for view in views)


def patterns(model: nn.Module) -> dict[Mask, list[str]]:
    """The masks of a model's attention, and the names of the kernels that have each."""
    found: dict[Mask, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Kernel) and module.cache_mask is not None:
            found.setdefault(module.cache_mask, []).append(name)
    return found


def _views(mask: Mask, length: int, heads: int, layout: ContiguousLayout | PrefixedLayout) -> Iterator[MaskView]:
    kinds: dict[Mask, list[int]] = {}
    for head in range(heads):
        kinds.setdefault(mask.for_head(head), []).append(head)
    for kind, numbers in list(kinds.items())[:PICTURES]:
        yield MaskView(tuple(numbers), _shares(kind, length, layout))


def _shares(mask: Mask, length: int, layout: ContiguousLayout | PrefixedLayout) -> Float[Tensor, "c c"]:
    """How much of each cell is visible, a strip of queries at a time."""
    size, keys = -(-length // CELLS), materialize(layout, length)
    strips = []
    for begin in range(0, length, size):
        queries = keys.columns(begin, min(begin + size, length))
        strips.append(_columns(mask.dense(queries, keys, 1)[0, 0], size))
    return torch.stack(strips)


def _columns(seen: Bool[Tensor, "r l"], size: int) -> Float[Tensor, " c"]:
    return torch.stack([part.float().mean() for part in torch.split(seen, size, dim=1)])


def _text(view: MaskView, *, several: bool) -> Iterator[str]:
    if several:
        yield f"heads {', '.join(map(str, view.heads))}"
    for row in view.cells.tolist():
        # rounded up from nothing and down from everything, so that both ends are exact
        yield "".join(SHADES[0] if share == 0 else SHADES[4 if share == 1 else 1 + int(share * 3)] for share in row)


def _paint(mask: Mask, length: int, views: list[MaskView], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * len(views), 4.6), layout="constrained")
    for number, view in enumerate(views):
        axis = figure.add_subplot(1, len(views), number + 1)
        axis.imshow(view.cells.numpy(), cmap="Blues", vmin=0, vmax=1, extent=(0, length, length, 0))
        axis.set_xlabel("key")
        axis.set_ylabel("query")
        if len(views) > 1:
            axis.set_title(f"heads {', '.join(map(str, view.heads))}", fontsize=9)
    figure.suptitle(repr(mask) if len(repr(mask)) < 70 * len(views) else f"{repr(mask)[:66]} ...", fontsize=9)
    write_picture(figure, path)
