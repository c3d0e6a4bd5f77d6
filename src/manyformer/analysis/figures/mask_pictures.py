"""Pictures of which tokens each output depends on: by attention masks, or measured by exchanging tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.base.files.figures import check_picture, panels, write_picture
from manyformer.models import Model
from manyformer.models.model import eval_mode
from manyformer.models.tasks import Inputs
from manyformer.nn.core import ContiguousLayout, PrefixedLayout
from manyformer.nn.kernels.kernel import named_kernels
from manyformer.nn.masks import Mask
from manyformer.nn.ops.static_layout import materialize
from manyformer.recipes.parts.registry import task_of

MAX_CELLS = 64
"""The most cells per side; for longer sequences a cell stands for several positions."""

MAX_LENGTH = 8192
"""The most tokens of a drawn mask, because every pair is computed."""

SHADES = "·░▒▓█"
"""Characters for cells that are not visible, visible up to 1/3, up to 2/3, above 2/3, and completely visible."""

MAX_PANELS = 4
"""The most panels, one for each set of heads with the same mask."""

MAX_TOKENS = 128
"""The most tokens of a picture: a pass is made with as many rows as tokens."""

ROUNDING = 1e-5
"""Smaller changes, relative to the row's largest, count as none."""


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
        # equal masks compare equal, so that heads without a pattern of their own share a panel
        heads_by_mask.setdefault(mask.for_head(head), []).append(head)
    for head_mask, head_indices in list(heads_by_mask.items())[:MAX_PANELS]:
        yield MaskView(tuple(head_indices), _visible_shares(head_mask, length, layout))


def _visible_shares(mask: Mask, length: int, layout: ContiguousLayout | PrefixedLayout) -> Float[Tensor, "c c"]:
    """The visible share of each cell, computed for one strip of queries at a time."""
    # rounded up, so that there are never more cells than fit
    cell_size = -(-length // MAX_CELLS)
    keys = materialize(layout, length)
    strips = []
    for start in range(0, length, cell_size):
        # a strip of queries against all keys: the whole mask of 8192 tokens would take 64 MB for every head
        visible = mask.dense(keys.columns(start, min(start + cell_size, length)), keys, 1)[0, 0]
        strips.append(torch.stack([cell.float().mean() for cell in torch.split(visible, cell_size, dim=1)]))
    return torch.stack(strips)


def _text_lines(view: MaskView, *, with_heads: bool) -> Iterator[str]:
    if with_heads:
        yield f"heads {', '.join(map(str, view.heads))}"
    yield from shaded_rows(view.cells)


def shaded_rows(cells: Float[Tensor, "r c"]) -> Iterator[str]:
    """A line of characters for each row of shares between 0 and 1."""
    return ("".join(map(_shade, row)) for row in cells.tolist())


def _shade(share: float) -> str:
    # shares between 0 and 1 never get the characters of 0 and 1, so that both are exact
    if share == 0:
        return SHADES[0]
    if share == 1:
        return SHADES[-1]
    return SHADES[1 + int(share * 3)]


def _draw_figure(mask: Mask, length: int, views: list[MaskView], path: Path) -> None:
    figure, axes = panels(1, len(views), (4.2, 4.6), grid=False)
    for axis, view in zip(axes, views):
        axis.imshow(view.cells.numpy(), cmap="Blues", vmin=0, vmax=1, extent=(0, length, length, 0))
        axis.set(xlabel="key", ylabel="query")
        if len(views) > 1:
            axis.set_title(f"heads {', '.join(map(str, view.heads))}", fontsize=9)
    figure.suptitle(repr(mask) if len(repr(mask)) < 70 * len(views) else f"{repr(mask)[:66]} ...", fontsize=9)
    write_picture(figure, path)


def mixing_strengths(model: Model, inputs: Inputs) -> Float[Tensor, "l l"]:
    """How strongly each output (rows) depends on each token (columns), between 0 and 1 in each row.

    A strength is the norm of the change of an output's logits if the token alone is exchanged for another one, a mean
    over the rows of `inputs` (b, l), divided by the row's largest strength of another token than the output's own; that
    of its own token, which residual connections pass on unmixed, is at most 1. Attention that chooses by content may
    choose others for the exchanged token. Raises UserError for a model without an output for each token, and for more
    than 128 tokens.
    """
    task = task_of(model)
    if not task.per_token:
        raise UserError(f"{model.spec.recipe} has one output for all tokens: {task.reasons['per_token']}")
    if inputs.tokens.shape[1] > MAX_TOKENS:
        raise UserError(f"length ({inputs.tokens.shape[1]}) must be at most {MAX_TOKENS} for a picture of mixing")
    with torch.no_grad(), eval_mode(model):
        # row by row, because one pass has a row for each exchanged token already
        rows = [inputs.rows([row]) for row in range(inputs.tokens.shape[0])]
        strengths = torch.stack([_changes(model, row) for row in rows]).mean(0)
    # residual connections pass an output's own token on, which would outshine all mixing
    beside_own = strengths.masked_fill(torch.eye(len(strengths), dtype=torch.bool, device=strengths.device), 0)
    # an output that no other token reaches is divided by its own strength
    largest = torch.where(beside_own.amax(1) > 0, beside_own.amax(1), strengths.amax(1)).clamp_min(1e-30)
    relative = strengths / largest[:, None]
    return relative.masked_fill(relative < ROUNDING, 0).clamp_max(1)


def _changes(model: Model, row: Inputs) -> Float[Tensor, "l l"]:
    """The norms of the changes of all outputs (rows) for each exchanged token (columns) of one row of inputs."""
    task = task_of(model)
    length = row.tokens.shape[1]
    inputs = row.rows([0] * length)
    tokens = inputs.tokens.clone()
    # row i has token i exchanged
    tokens.diagonal().copy_(_others(row.tokens[0], task.token_ids(model)))
    logits, exchanged = (task.call(model, part).logits for part in (inputs, inputs._replace(tokens=tokens)))
    changes: Tensor = torch.linalg.vector_norm(exchanged - logits, dim=-1)
    return changes.T


def _others(tokens: Int[Tensor, " l"], ids: int) -> Int[Tensor, " l"]:
    """Another token for each, about half of all ids away."""
    # deterministic, so that a picture can be drawn again; far away, so that hashing and routing change too
    return (tokens + max(1, ids // 2)) % ids


def draw_mixing(strengths: Float[Tensor, "l l"], *, path: str | Path | None = None) -> str:
    """Show the strengths as text, with a row for each output and a column for each token.

    With `path` they are also drawn there: PNG, SVG or PDF. Raises UserError for other formats."""
    if path is not None:
        check_picture(Path(path))
        figure, (axis,) = panels(1, 1, (4.6, 4.2), grid=False)
        image = axis.imshow(strengths.cpu().numpy(), cmap="Blues", vmin=0, vmax=1)
        axis.set(xlabel="exchanged token", ylabel="output")
        figure.colorbar(image, ax=axis, label="change, relative to the row's largest beside its own", shrink=0.8)
        write_picture(figure, Path(path))
    return "\n".join(shaded_rows(strengths))
