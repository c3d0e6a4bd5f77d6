"""The few abstractions that everything else is made of; read this first.

Data flows tokens -> embedding -> layers -> head. Whatever changes the residual stream is a `Layer`: it takes the
stream, what the whole call shares (`Context`) and its own state, and returns an `LayerOutput`. One alphabet names the
axes: `b` batch, `l` queries, `s` keys, `h` heads, `g` key/value heads, `d` model, `e` head, `v` vocabulary, `m` memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyformer.dropout import Dropout

State = Any
"""A tree (tuples, lists, dicts) of batch-first tensors, with plain numbers and None as further leaves.

Only its maker looks inside; everybody else passes it on or maps over its tensors with `tree_map`."""

WatchFn = Callable[[nn.Module, str, Tensor], None]

PADDING_SEGMENT = -1
"""The segment number of a token that nobody may see."""


def no_watch(module: nn.Module, name: str, value: Tensor) -> None:
    """The watcher of a call that nobody watches."""


class ContiguousLayout(NamedTuple):
    """Every row is one document, number 0, without padding, at positions `init_state`, `init_state` + 1, and so on."""

    start: int = 0


class AlignedLayout(NamedTuple):
    """Tokens of one document stand side by side in their row: their positions differ as their columns do.

    `init_state` is the number of the first column, counted from the beginning of the stream. Rows may be at different
    positions, and may hold several documents, one after the other.
    """

    start: int


class PackedLayout(NamedTuple):
    """Where the documents of each row lie: (row, first column, column after the last); all else is padding."""

    documents: tuple[tuple[int, int, int], ...]

    @property
    def right_padded(self) -> bool:
        """Whether each row is at most one document that begins in the first column."""
        rows = [row for row, _, _ in self.documents]
        return len(set(rows)) == len(rows) and all(begin == 0 for _, begin, _ in self.documents)


class PrefixedLayout(NamedTuple):
    """The first `prefix` columns are summaries, which stand before a text, or padding; `text_layout` tells of the text.

    Where that is `ContiguousLayout()` there is no padding and summary i is at position i, of part i where parts are of
    `part_length` tokens each, of none where that is None."""

    prefix: int
    text_layout: ContiguousLayout | None = None
    part_length: int | None = None


GLOBAL_ROLE = 1
"""The role of a token that sees all and is seen by all, where masks let it."""

SUMMARY_ROLE = -1
"""The role of a token that belongs to no text but stands before one; nobody gives it to tokens of a text."""


class DependencyTree(NamedTuple):
    """Where tokens hang in the dependency trees of their documents; -1 in all three for a token in no tree.

    `depth` counts the edges to the root, `preorder` numbers the nodes of a document's tree in preorder, and
    `last_descendant` is the highest number in the subtree of the token's node: token i hangs on j, or on what hangs on
    j, or is of the same node, where first_j <= first_i <= last_j. `manyformer.dependency_trees.walk` makes the three
    from heads."""

    depth: Int[Tensor, "b l"]
    preorder: Int[Tensor, "b l"]
    last_descendant: Int[Tensor, "b l"]


class TokenPositions(NamedTuple):
    """Where tokens are; it travels with them through caches, memories and gathers.

    `position_ids` is the position within the token's document, `segment_ids` the document within the row
    (`PADDING_SEGMENT` for padding); a token sees only its own segment. `layout` is what is known of both without
    looking at the tensors, which lets a kernel pick its fastest exact path; None promises nothing. `tree` is there
    where the model was told of trees. `roles` is a number that masks may ask for, such as `GLOBAL_ROLE`; None means 0
    for every token. `part_ids` is the number of the stretch of its document, such as a sentence, that a token belongs
    to, -1 or None for none."""

    position_ids: Int[Tensor, "b l"]
    segment_ids: Int[Tensor, "b l"]
    layout: ContiguousLayout | AlignedLayout | PackedLayout | PrefixedLayout | None = None
    tree: DependencyTree | None = None
    roles: Int[Tensor, "b l"] | None = None
    part_ids: Int[Tensor, "b l"] | None = None

    def columns(self, begin: int, end: int) -> "TokenPositions":
        """The places of the tokens from column `begin` to before column `end`."""
        tree = None if self.tree is None else DependencyTree(*(part[:, begin:end] for part in self.tree))
        known = self.layout
        layout = type(known)(known.start + begin) if isinstance(known, ContiguousLayout | AlignedLayout) else None
        role, part = (None if field is None else field[:, begin:end] for field in (self.roles, self.part_ids))
        return TokenPositions(self.position_ids[:, begin:end], self.segment_ids[:, begin:end], layout, tree, role, part)


class LayerOutput(NamedTuple):
    """What a layer returns; auxiliary losses (ponder cost, span penalty, ...) are summed on the way up."""

    y: Float[Tensor, "b l d"]
    state: State = None
    loss: Tensor | float = 0.0


class MemorySequence(NamedTuple):
    """Another sequence that a layer may attend to, such as an encoder's output."""

    y: Float[Tensor, "b s d"]
    positions: TokenPositions


@dataclass(frozen=True, slots=True)
class Context:
    """What a whole call shares; nothing that belongs to one model may be added."""

    positions: TokenPositions
    memory: MemorySequence | None = None
    watch: WatchFn = no_watch


class Layer(nn.Module, ABC):
    """Whatever changes the residual stream: attention, a mixer, a feed-forward, a whole stack."""

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token; `capacity` reserves room for that many tokens, to be written in place."""
        return ()

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        """With `state` None nothing is remembered; otherwise go on from it and return the next one."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput: ...


@final
class Pointwise(Layer):
    """A module that treats each token by itself, as a layer: a final norm, a projection."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(self.inner(x), state)


class LayeredStack(Layer):
    """Layers within a layer, between which losses may be taken."""

    @abstractmethod
    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        """What comes out of each layer in turn, without a state; what comes last is what `forward` gives."""


@final
class Chain(LayeredStack):
    """Layers one after the other, named by their keywords: the names become part of the checkpoint."""

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return [layer.init_state(batch, capacity=capacity, device=device, dtype=dtype) for layer in self._layers()]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        loss: Tensor | float = 0.0
        after: list[State] = []
        for number, layer in enumerate(self._layers()):
            x, new, extra = layer(x, ctx, None if state is None else state[number])
            after.append(new)
            loss = loss + extra
        return LayerOutput(x, None if state is None else after, loss)

    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        outs: list[LayerOutput] = []
        for layer in self._layers():
            outs.append(layer(x, ctx))
            x = outs[-1].y
        return outs

    def _layers(self) -> Iterable[Layer]:
        # `children()` looks for repetitions first, which takes longer than a small layer does for one token
        return self._modules.values()  # type: ignore[return-value]


class ResidualJoin(nn.Module, ABC):
    """How a branch joins the residual stream."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]: ...


@final
class AddJoin(ResidualJoin):
    """The sum (He et al. 2016), after dropout of the branch (Vaswani et al. 2017, section 5.4)."""

    def __init__(self, *, dropout: float) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "b l d"], branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        dropped: Tensor = self.dropout(branch)
        return x + dropped


@final
class Residual(Layer):
    """A branch around `inner`: y = after(join(x, within(inner(before(x))))).

    Post-norm (Vaswani et al. 2017) sets `post_norm`, pre-norm (Xiong et al. 2020) `pre_norm`, sandwich norm (Ding et
    al. 2021, section 2.4) `pre_norm` and `inner_norm`. None is the identity, or the plain sum for `join`."""

    def __init__(
        self,
        inner: Layer,
        *,
        pre_norm: nn.Module | None = None,
        inner_norm: nn.Module | None = None,
        post_norm: nn.Module | None = None,
        join: ResidualJoin | None = None,
    ) -> None:
        super().__init__()
        self.inner, self.pre_norm, self.inner_norm, self.post_norm = inner, pre_norm, inner_norm, post_norm
        self.join = join

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.init_state(batch, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        branch, state, loss = self.inner(x if self.pre_norm is None else self.pre_norm(x), ctx, state)
        branch = branch if self.inner_norm is None else self.inner_norm(branch)
        y = x + branch if self.join is None else self.join(x, branch)
        return LayerOutput(y if self.post_norm is None else self.post_norm(y), state, loss)


def tree_map(fn: Callable[[Tensor], Tensor], state: State) -> State:
    """`state` with `fn` applied to every tensor; all other leaves stay as they are."""
    if isinstance(state, Tensor):
        return fn(state)
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(tree_map(fn, part) for part in state))
    if isinstance(state, list | tuple):
        return type(state)(tree_map(fn, part) for part in state)
    if isinstance(state, dict):
        return {name: tree_map(fn, part) for name, part in state.items()}
    return state
