"""Removal of heads from weights: rows and columns of projections, and tensors with an axis of heads."""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.runtime.torch_internals import is_plain
from manyformer.nn.runtime.training_hooks import OptimizerHints


class HeadSelection(NamedTuple):
    """The heads that remain of `total`, and the key heads that remain of `kv_total`, by number in ascending order."""

    heads: tuple[int, ...]
    total: int
    kv_heads: tuple[int, ...]
    kv_total: int

    def entries(self, size: int) -> tuple[int, ...]:
        """The entries that remain on an axis of `size` heads or key heads; an axis of size 1 is that of all heads.

        Raises ValueError for other sizes."""
        if size == self.total:
            return self.heads
        if size == self.kv_total:
            return self.kv_heads
        if size == 1:
            return (0,)
        raise ValueError(f"an axis of {size} entries is neither that of {self.total} heads nor of {self.kv_total}")


class PerHeadTensors(nn.Module):
    """A module with parameters or buffers that have an axis of heads, which `keep_heads` can shorten.

    `head_axes` names each of them with that axis, counted from the last one, which is -1; a tensor with fewer axes
    serves all heads."""

    head_axes: tuple[tuple[str, int], ...] = ()

    @property
    def differs_by_head(self) -> bool:
        """Whether heads have different entries, so that removing a head changes the module."""
        tensors: list[tuple[Tensor, int]] = [(getattr(self, name), axis) for name, axis in self.head_axes]
        return not tensors or any(tensor.ndim >= -axis and tensor.shape[axis] > 1 for tensor, axis in tensors)

    def keep_heads(self, selection: HeadSelection) -> None:
        """Remove the entries of all other heads, in place."""
        for name, axis in self.head_axes:
            tensor: Tensor = getattr(self, name)
            if tensor.ndim >= -axis:
                select_entries(self, name, selection.entries(tensor.shape[axis]), axis)
        if isinstance(heads := getattr(self, "heads", None), int):
            self.heads = len(selection.entries(heads))


@torch.no_grad()
def select_entries(module: nn.Module, name: str, index: Sequence[int], axis: int) -> None:
    """Replace a parameter or buffer of `module` by its entries `index` along `axis`."""
    tensor: Tensor = getattr(module, name)
    selected = tensor.index_select(axis, torch.tensor(index, dtype=torch.long, device=tensor.device))
    if isinstance(tensor, nn.Parameter):
        # a new parameter, since the size of one cannot change; optimizers are built after heads are removed
        selected = nn.Parameter(selected, requires_grad=tensor.requires_grad)
    setattr(module, name, selected)


def head_channels(heads: Sequence[int], width: int) -> list[int]:
    """The channels of `heads`, of `width` channels each."""
    return [head * width + channel for head in heads for channel in range(width)]


def check_plain_linear(linear: nn.Module) -> None:
    """Raise UserError unless a linear map is its matrix and nothing else."""
    if not is_plain(linear, nn.Linear):
        raise UserError(
            f"heads cannot be removed from a {type(linear).__name__} that has hooks, an adapter, parametrizations or "
            "quantized weights: merge or remove these first"
        )


def select_outputs(linear: nn.Linear, index: Sequence[int]) -> None:
    """Remove all output channels of a linear map but those in `index`, in place."""
    check_plain_linear(linear)
    select_entries(linear, "weight", index, 0)
    if linear.bias is not None:
        select_entries(linear, "bias", index, 0)
    linear.out_features = len(index)


def select_inputs(linear: nn.Linear, index: Sequence[int]) -> None:
    """Remove all input channels of a linear map but those in `index`, in place."""
    check_plain_linear(linear)
    select_entries(linear, "weight", index, 1)
    linear.in_features = len(index)


def select_head_outputs(linear: nn.Linear, selection: HeadSelection) -> None:
    """Remove the outputs of a linear map that belong to heads which do not remain, in place."""
    select_outputs(linear, head_channels(selection.heads, linear.out_features // selection.total))


def select_head_pairs(linear: nn.Linear, selection: HeadSelection) -> None:
    """Remove the outputs of other heads from a linear map to keys of all heads, then values of all heads, in place."""
    width = linear.out_features // (2 * selection.total)
    # the rows of keys of all heads come first, those of values after them
    keys = head_channels(selection.heads, width)
    select_outputs(linear, [*keys, *(selection.total * width + channel for channel in keys)])


def select_head_inputs(linear: nn.Linear, selection: HeadSelection) -> None:
    """Remove the inputs of a linear map that belong to heads which do not remain, in place."""
    select_inputs(linear, head_channels(selection.heads, linear.in_features // selection.total))


@final
class HeadProjection(PerHeadTensors, OptimizerHints):
    """Maps a stream (b, l, d) to `width` channels of each head (b, h, l, `width`), by one matrix or by two.

    With `rank` the map is the product of two matrices with `rank` channels between them, the first shared by all heads.
    """

    def __init__(self, dim: int, heads: int, width: int, *, rank: int | None = None, bias: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.width = width
        if rank is None:
            self.down = None
        else:
            self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(dim if rank is None else rank, heads * width, bias=bias)
        if width == 1:
            # the gates of heads, one row each
            self.adamw_weights = ("up.weight",)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the matrices with Glorot's uniform distribution."""
        for linear in (self.down, self.up):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l n"]:
        y: Tensor = self.up(x if self.down is None else self.down(x))
        # (b, l, h n) to (b, h, l, n)
        return y.view(*x.shape[:2], self.heads, self.width).transpose(1, 2)

    @property
    def differs_by_head(self) -> bool:
        return True

    def keep_heads(self, selection: HeadSelection) -> None:
        select_head_outputs(self.up, selection)
        self.heads = len(selection.heads)
