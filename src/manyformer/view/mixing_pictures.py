"""Pictures of how strongly each output of a model depends on each token, measured by exchanging tokens."""

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyformer.errors import UserError
from manyformer.models import Model
from manyformer.recipes.registry import task_of
from manyformer.tasks import Inputs
from manyformer.training_hooks import eval_mode
from manyformer.view.figures import check_picture, panels, write_picture
from manyformer.view.mask_pictures import shaded_rows

MAX_TOKENS = 128
"""The most tokens of a picture: a pass is made with as many rows as tokens."""

ROUNDING = 1e-5
"""Smaller changes, relative to the row's largest, count as none."""


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
        rows = [inputs.rows([row]) for row in range(inputs.tokens.shape[0])]
        strengths = torch.stack([_changes(model, row) for row in rows]).mean(0)
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
    tokens.diagonal().copy_(_others(row.tokens[0], task.token_ids(model)))
    logits, exchanged = (task.call(model, part).logits for part in (inputs, inputs._replace(tokens=tokens)))
    changes: Tensor = torch.linalg.vector_norm(exchanged - logits, dim=-1)
    return changes.T


def _others(tokens: Int[Tensor, " l"], ids: int) -> Int[Tensor, " l"]:
    """Another token for each, about half of all ids away."""
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
