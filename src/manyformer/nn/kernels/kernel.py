"""The interface of every attention algorithm: outputs from queries, keys and values.

Also what kernels report of themselves: the attention weights that parts of a model give to `watch`, with what their
rows and columns are, and the ring of processes in which a kernel may share the columns of its rows.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from manyformer.nn.core import (
    Layer,
    LayerOutput,
    MakesStream,
    RecordModule,
    State,
    TokenPositions,
    WatchFn,
    WeightAxes,
    no_watch,
)
from manyformer.nn.masks.mask import Mask
from manyformer.nn.ops.softmax_attention import softmax_attention_reference
from manyformer.nn.positions.position import Position


class TokenRing(ABC):
    """Process `rank` of `size`, in the order of their columns."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], rank: int) -> None:
        """Send tensors to a process."""

    @abstractmethod
    def receive(self, like: Sequence[Tensor], rank: int) -> list[Tensor]:
        """Receive tensors with these shapes from a process."""

    @abstractmethod
    def pass_on(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Send these to the next process; returns those of the previous one, which have the same shapes."""


class KernelCall(NamedTuple):
    """The inputs of one attention call; a wrapper passes it on with `_replace`.

    Queries have `extra_query_dim` channels more than keys."""

    q: Float[Tensor, "b h l e"]
    k: Float[Tensor, "b g s e"]
    v: Float[Tensor, "b g s f"]
    query_positions: TokenPositions
    key_positions: TokenPositions
    position: Position
    state: State = None
    watch: WatchFn = no_watch

    def softmax_reference(
        self, mask: Bool[Tensor, "#b #h l s"], *, scale: float, dropout: float = 0.0
    ) -> tuple[Float[Tensor, "b h l f"], Float[Tensor, "b h l s"]]:
        """Softmax attention by its definition: outputs and weights of all pairs that the mask shows."""
        q, k, v, query_positions, key_positions, position, *_ = self
        positions = {"query_positions": query_positions, "key_positions": key_positions}
        return softmax_attention_reference(q, k, v, mask, scale=scale, dropout=dropout, position=position, **positions)


class Kernel(RecordModule, ABC):
    """An attention algorithm.

    `supports` names what a position may change, of query, key, score and value; `Attention` refuses one that changes
    more. `recurrent` says that the kernel keeps a summary of earlier keys in its state instead of the keys themselves.
    `gate_dim` is the number of channels per token and key head that the layer projects in addition to the values; they
    are the last channels of `v`. The projection of the values makes them, or the kernel's own `gate_projection`, which
    maps what the layer projects (b, l, d) to (b, g, l, gate_dim). `extra_query_dim` is the same for queries; no
    position changes these channels. `tied_qk` says that the queries are the keys of the same tokens, with one
    projection for both. `content_based` says that the pairs to compute depend on the content of the tokens, so the cost
    cannot be derived from shapes. `scores_at_most_zero` says that no score is positive, so their positive part is
    empty, `couples_heads` that outputs of one head depend on those of others, so that no head can be removed, and
    `has_other_weights` that softmax kernels inside it form only a part of its weights, which dropout cannot act on.
    `mixes_keys` says that the columns of the weights it reports are no keys but slots, each of which mixes keys,
    `implies_weights` that it never forms the weights it reports unless they are watched, and `switches_by_length` that
    the length of a row decides what it computes."""

    supports: frozenset[str]
    recurrent: bool = False
    gate_dim: int = 0
    extra_query_dim: int = 0
    tied_qk: bool = False
    content_based: bool = False
    scores_at_most_zero: bool = False
    couples_heads: bool = False
    has_other_weights: bool = False
    mixes_keys: bool = False
    implies_weights: bool = False
    switches_by_length: bool = False
    cache_mask: Mask | None = None
    """The mask of a kernel that has one: a cache may evict keys that no later query can see under it."""

    @property
    def gate_projection(self) -> nn.Module | None:
        """The kernel's own projection of its gates; None if the layer projects them with its values."""
        return None

    @abstractmethod
    def forward(self, call: KernelCall) -> LayerOutput:
        """Compute the outputs (b, h, l, f) of all queries; f is the width of `call.v` without gates."""

    def init_state(self, batch: int, *, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token."""
        return ()

    def drop_weights(self, probability: float) -> bool:
        """Drop each of its weights with this probability in training; False if it forms none that it could drop."""
        return False

    def column_obstacle(self) -> str | None:
        """Why several processes cannot divide the columns of its rows; None if they can, after `share_columns`."""
        return f"{type(self).__name__} is neither softmax nor linear attention"

    def share_columns(self, ring: TokenRing) -> None:
        """Compute, from now on, this process's columns of rows whose other columns the other processes hold."""
        raise NotImplementedError(self.column_obstacle())

    @abstractmethod
    def explain(self, call: KernelCall) -> str:
        """Return one sentence: the path that this call would take, and the reason."""

    if TYPE_CHECKING:

        def __call__(self, call: KernelCall) -> LayerOutput: ...


def named_kernels(module: nn.Module) -> dict[str, Kernel]:
    """The kernels within a module by their names, also those that are parts of other kernels."""
    return {name: part for name, part in module.named_modules() if isinstance(part, Kernel)}


class ReportedWeights(NamedTuple):
    """Attention weights of one call: the name of the part that reported them, and what their rows and columns are.

    `implied` says that the part never forms them unless they are watched."""

    part: str
    axes: WeightAxes
    weights: Float[Tensor, "b h l s"]
    implied: bool = False

    @property
    def remembered(self) -> int:
        """The number of leading columns that are no queries of this call: the keys of a stream end with these."""
        if self.axes == WeightAxes():
            return self.weights.shape[-1] - self.weights.shape[-2]
        return 0


class WeightReports:
    """Finds the attention weights among all that parts of `model` report to `watch`."""

    def __init__(self, model: nn.Module) -> None:
        self._axes = weight_axes(model)
        self.names = {module: name for name, module in model.named_modules()}

    def read(self, module: nn.Module, name: str, value: Tensor) -> ReportedWeights | None:
        """The attention weights that a report is; None for all other values."""
        if name == "weights":
            axes = self._axes.get(module, WeightAxes())
        elif name == "sort":
            axes = WeightAxes("blocks", "blocks")
        elif name == "neighbour_weights":
            axes = WeightAxes(keys="neighbours")
        else:
            return None
        implied = isinstance(module, Kernel) and module.implies_weights
        return ReportedWeights(self.names[module], axes, value, implied)


def weight_axes(model: nn.Module) -> dict[nn.Module, WeightAxes]:
    """What the rows and columns are of the weights that each module within a layer reports.

    The innermost layer says what its keys are made of, and modules around it what its stream is made of."""
    axes: dict[nn.Module, WeightAxes] = {}
    for layer in model.modules():
        if isinstance(layer, Layer):
            axes |= dict.fromkeys(layer.modules(), WeightAxes(keys=layer.key_origin))
    # from the innermost to the outermost module: each changes what the ones inside it have said
    for outer in reversed(list(model.modules())):
        if isinstance(outer, MakesStream):
            axes |= {part: outer.outer_axes(axes[part]) for part in outer.modules() if part in axes}
    for kernel in model.modules():
        if isinstance(kernel, Kernel) and kernel.mixes_keys:
            axes[kernel] = WeightAxes(keys="slots")
    return axes
