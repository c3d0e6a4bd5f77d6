"""The few abstractions that everything else is made of; read this first.

Data flows tokens -> embedding -> layers -> head. Whatever changes the residual stream is a `Layer`: it takes the
stream, what the whole call shares (`Context`) and its own state, and returns an `Out`. One alphabet names the axes:
`b` batch, `l` queries, `s` keys, `h` heads, `g` key/value heads, `d` model, `e` head, `v` vocabulary, `m` memory.
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

Watch = Callable[[nn.Module, str, Tensor], None]

PADDING = -1
"""The segment number of a token that nobody may see."""


def ignore(module: nn.Module, name: str, value: Tensor) -> None:
    """The watcher of a call that nobody watches."""


class Plain(NamedTuple):
    """Every row is one document, number 0, without padding, at positions `start`, `start` + 1, and so on."""

    start: int = 0


class Lined(NamedTuple):
    """Tokens of one document stand side by side in their row: their positions differ as their columns do.

    `start` is the number of the first column, counted from the beginning of the stream. Rows may be at different
    positions, and may hold several documents, one after the other.
    """

    start: int


class Packed(NamedTuple):
    """Where the documents of each row lie: (row, first column, column after the last); all else is padding."""

    documents: tuple[tuple[int, int, int], ...]

    @property
    def right_padded(self) -> bool:
        """Whether each row is at most one document that begins in the first column."""
        rows = [row for row, _, _ in self.documents]
        return len(set(rows)) == len(rows) and all(begin == 0 for _, begin, _ in self.documents)


class Fronted(NamedTuple):
    """The first `front` columns are summaries, which stand before a text, or padding; `behind` tells of the text.

    Where that is `Plain()` there is no padding and summary i is at position i, of part i where parts are of `stretch`
    tokens each, of none where that is None.
    """

    front: int
    behind: Plain | None = None
    stretch: int | None = None


GLOBAL = 1
"""The role of a token that sees all and is seen by all, where masks let it."""

SUMMARY = -1
"""The role of a token that belongs to no text but stands before one; nobody gives it to tokens of a text."""


class Tree(NamedTuple):
    """Where tokens hang in the dependency trees of their documents; -1 in all three for a token in no tree.

    `depth` counts the edges to the root, `first` numbers the nodes of a document's tree in preorder, and `last` is the
    highest number in the subtree of the token's node: token i hangs on j, or on what hangs on j, or is of the same
    node, where first_j <= first_i <= last_j. `manyformer.trees.walk` makes the three from heads.
    """

    depth: Int[Tensor, "b l"]
    first: Int[Tensor, "b l"]
    last: Int[Tensor, "b l"]


class Place(NamedTuple):
    """Where tokens are; it travels with them through caches, memories and gathers.

    `pos` is the position within the token's document, `seg` the document within the row (`PADDING` for padding);
    a token sees only its own segment. `layout` is what is known of both without looking at the tensors, which lets a
    kernel pick its fastest exact path; None promises nothing. `tree` is there where the model was told of trees.
    `role` is a number that masks may ask for, such as `GLOBAL`; None means 0 for every token. `part` is the number of
    the stretch of its document, such as a sentence, that a token belongs to, -1 or None for none.
    """

    pos: Int[Tensor, "b l"]
    seg: Int[Tensor, "b l"]
    layout: Plain | Lined | Packed | Fronted | None = None
    tree: Tree | None = None
    role: Int[Tensor, "b l"] | None = None
    part: Int[Tensor, "b l"] | None = None

    def columns(self, begin: int, end: int) -> "Place":
        """The places of the tokens from column `begin` to before column `end`."""
        tree = None if self.tree is None else Tree(*(part[:, begin:end] for part in self.tree))
        known = self.layout
        layout = type(known)(known.start + begin) if isinstance(known, Plain | Lined) else None
        role, part = (None if field is None else field[:, begin:end] for field in (self.role, self.part))
        return Place(self.pos[:, begin:end], self.seg[:, begin:end], layout, tree, role, part)


class Out(NamedTuple):
    """What a layer returns; auxiliary losses (ponder cost, span penalty, ...) are summed on the way up."""

    y: Float[Tensor, "b l d"]
    state: State = None
    loss: Tensor | float = 0.0


class Memory(NamedTuple):
    """Another sequence that a layer may attend to, such as an encoder's output."""

    y: Float[Tensor, "b s d"]
    place: Place


@dataclass(frozen=True, slots=True)
class Context:
    """What a whole call shares; nothing that belongs to one model may be added."""

    place: Place
    memory: Memory | None = None
    watch: Watch = ignore


class Layer(nn.Module, ABC):
    """Whatever changes the residual stream: attention, a mixer, a feed-forward, a whole stack."""

    def start(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token; `capacity` reserves room for that many tokens, to be written in place."""
        return ()

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        """With `state` None nothing is remembered; otherwise go on from it and return the next one."""

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ctx: Context, state: State = None) -> Out: ...


@final
class Pointwise(Layer):
    """A module that treats each token by itself, as a layer: a final norm, a projection."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        return Out(self.inner(x), state)


class Deep(Layer):
    """Layers within a layer, between which losses may be taken."""

    @abstractmethod
    def each(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[Out]:
        """What comes out of each layer in turn, without a state; what comes last is what `forward` gives."""


@final
class Chain(Deep):
    """Layers one after the other, named by their keywords: the names become part of the checkpoint."""

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def start(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return [layer.start(batch, capacity=capacity, device=device, dtype=dtype) for layer in self._layers()]

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        loss: Tensor | float = 0.0
        after: list[State] = []
        for number, layer in enumerate(self._layers()):
            x, new, extra = layer(x, ctx, None if state is None else state[number])
            after.append(new)
            loss = loss + extra
        return Out(x, None if state is None else after, loss)

    def each(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[Out]:
        outs: list[Out] = []
        for layer in self._layers():
            outs.append(layer(x, ctx))
            x = outs[-1].y
        return outs

    def _layers(self) -> Iterable[Layer]:
        # `children()` looks for repetitions first, which takes longer than a small layer does for one token
        return self._modules.values()  # type: ignore[return-value]


class Join(nn.Module, ABC):
    """How a branch joins the residual stream."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]: ...


@final
class Add(Join):
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

    Post-norm (Vaswani et al. 2017) sets `after`, pre-norm (Xiong et al. 2020) `before`, sandwich norm (Ding et al.
    2021, section 2.4) `before` and `within`. None is the identity, or the plain sum for `join`.
    """

    def __init__(
        self,
        inner: Layer,
        *,
        before: nn.Module | None = None,
        within: nn.Module | None = None,
        after: nn.Module | None = None,
        join: Join | None = None,
    ) -> None:
        super().__init__()
        self.inner, self.before, self.within, self.after = inner, before, within, after
        self.join = join

    def start(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.start(batch, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> Out:
        branch, state, loss = self.inner(x if self.before is None else self.before(x), ctx, state)
        branch = branch if self.within is None else self.within(branch)
        y = x + branch if self.join is None else self.join(x, branch)
        return Out(y if self.after is None else self.after(y), state, loss)


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
