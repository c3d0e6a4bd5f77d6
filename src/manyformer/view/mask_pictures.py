"""Pictures of attention masks, as a figure and as text for the terminal."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import ContiguousLayout, PrefixedLayout
from manyformer.errors import UserError
from manyformer.kernels import named_kernels
from manyformer.masks import Mask
from manyformer.ops.static_layout import materialize
from manyformer.view.figures import check_picture, panels, write_picture

MAX_CELLS = 64
"""The most cells per side; for longer sequences a cell stands for several positions."""

MAX_LENGTH = 8192
"""The most tokens of a drawn mask, because every pair is computed."""

SHADES = "·░▒▓█"
"""Characters for cells that are not visible, visible up to 1/3, up to 2/3, above 2/3, and completely visible."""

MAX_PANELS = 4
"""The most panels, one for each set of heads with the same mask."""


class MaskView(NamedTuple):
    """Heads with the same mask, and the visible share of each cell (c, c)."""

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
    """Show `mask` for `length` tokens as text, with a row for each query and a column for each key.

    The tokens are one document, unless `layout` has a prefix of summaries. With `path` it is also drawn there: PNG, SVG
    or PDF. Heads with different masks are shown separately. Raises UserError for a length above 8192 and for other
    formats.
    """
    if not 1 <= length <= MAX_LENGTH:
        raise UserError(f"length ({length}) must be between 1 and {MAX_LENGTH}: every pair is computed")
    if path is not None:
        check_picture(Path(path))
    views = list(_views(mask, length, heads, layout or ContiguousLayout()))
    if path is not None:
        _draw_figure(mask, length, views, Path(path))
    return "\n\n".join("\n".join(_text_lines(view, with_heads=len(views) > 1)) for view in views)


def attention_masks(model: nn.Module) -> dict[Mask, list[str]]:
    """The attention masks of a model, each with the names of the kernels that use it."""
    kernel_names: dict[Mask, list[str]] = {}
    for name, kernel in named_kernels(model).items():
        if kernel.cache_mask is not None:
            kernel_names.setdefault(kernel.cache_mask, []).append(name)
    return kernel_names


def _views(mask: Mask, length: int, heads: int, layout: ContiguousLayout | PrefixedLayout) -> Iterator[MaskView]:
    heads_by_mask: dict[Mask, list[int]] = {}
    for head in range(heads):
        heads_by_mask.setdefault(mask.for_head(head), []).append(head)
    for head_mask, head_indices in list(heads_by_mask.items())[:MAX_PANELS]:
        yield MaskView(tuple(head_indices), _visible_shares(head_mask, length, layout))


def _visible_shares(mask: Mask, length: int, layout: ContiguousLayout | PrefixedLayout) -> Float[Tensor, "c c"]:
    """The visible share of each cell, computed for one strip of queries at a time."""
    cell_size = -(-length // MAX_CELLS)
    keys = materialize(layout, length)
    strips = []
    for start in range(0, length, cell_size):
        visible = mask.dense(keys.columns(start, min(start + cell_size, length)), keys, 1)[0, 0]
        strips.append(torch.stack([cell.float().mean() for cell in torch.split(visible, cell_size, dim=1)]))
    return torch.stack(strips)


def _text_lines(view: MaskView, *, with_heads: bool) -> Iterator[str]:
    if with_heads:
        yield f"heads {', '.join(map(str, view.heads))}"
    yield from shaded_rows(view.cells)


def shaded_rows(cells: Float[Tensor, "r c"]) -> Iterator[str]:
    """A line of characters for each row of shares between 0 and 1."""
    for row in cells.tolist():
        # shares between 0 and 1 never get the characters of 0 and 1, so that both are exact
        yield "".join(SHADES[0] if share == 0 else SHADES[4 if share == 1 else 1 + int(share * 3)] for share in row)


def _draw_figure(mask: Mask, length: int, views: list[MaskView], path: Path) -> None:
    figure, axes = panels(1, len(views), (4.2, 4.6), grid=False)
    for axis, view in zip(axes, views):
        axis.imshow(view.cells.numpy(), cmap="Blues", vmin=0, vmax=1, extent=(0, length, length, 0))
        axis.set(xlabel="key", ylabel="query")
        if len(views) > 1:
            axis.set_title(f"heads {', '.join(map(str, view.heads))}", fontsize=9)
    figure.suptitle(repr(mask) if len(repr(mask)) < 70 * len(views) else f"{repr(mask)[:66]} ...", fontsize=9)
    write_picture(figure, path)
