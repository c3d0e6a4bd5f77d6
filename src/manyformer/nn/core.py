"""The base classes and records that every other module builds on; read this first.

Data flows tokens -> embedding -> layers -> head. Every module that changes the residual stream is a `Layer`: it takes
the stream, the values that all layers of a call share (`Context`) and its own state, and returns a `LayerOutput`. The
axes of tensors are `b` batch, `l` queries, `s` keys, `h` heads, `g` key/value heads, `d` model, `e` head, `v`
vocabulary, `m` memory.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from manyformer.nn.model_inputs import PADDING_SEGMENT as PADDING_SEGMENT
from manyformer.nn.model_inputs import State as State
from manyformer.nn.model_inputs import tree_map as tree_map

KeyOrigin = Literal["stream", "source"]
"""What the keys of attention are made of: the layer's own stream and what it remembers of it, or another sequence."""

AxisKind = KeyOrigin | Literal["summaries", "latents", "slots", "blocks", "neighbours"]
"""What queries or keys are: tokens of the stream or of a source, summary tokens and then those of the stream, latent
vectors, slots that mix tokens, blocks of tokens, or tokens that were looked up."""


class WeightAxes(NamedTuple):
    """What the rows and the columns of reported attention weights are."""

    rows: AxisKind = "stream"
    keys: AxisKind = "stream"

    def with_summaries(self) -> "WeightAxes":
        """The axes where summary tokens were prepended to the stream."""
        rows, keys = ("summaries" if kind == "stream" else kind for kind in self)
        return WeightAxes(rows, keys)


class MakesStream(ABC):
    """A module whose parts do not get the stream that it gets, but one with further tokens, or made of others."""

    @abstractmethod
    def outer_axes(self, axes: WeightAxes) -> WeightAxes:
        """What the rows and columns of weights that a part reports are outside of this module."""


WatchFn = Callable[[nn.Module, str, Tensor], None]
"""Receives each value that a module reports, with its name. Attention weights (b, h, l, s) are called "weights"."""


def no_watch(module: nn.Module, name: str, value: Tensor) -> None:
    """The default `WatchFn`: discards every reported value."""


@final
class ValueRecorder:
    """A `WatchFn` that keeps each value that `module` reports as `name`, and passes all reports on to `watch`."""

    def __init__(self, module: nn.Module, name: str, watch: WatchFn = no_watch) -> None:
        self._module = module
        self._name = name
        self._watch = watch
        self.values: list[Tensor] = []

    def __call__(self, module: nn.Module, name: str, value: Tensor) -> None:
        if module is self._module and name == self._name:
            self.values.append(value)
        self._watch(module, name, value)


class ContiguousLayout(NamedTuple):
    """Every row is one document with segment id 0, without padding, at positions `start`, `start` + 1, and so on."""

    start: int = 0


class AlignedLayout(NamedTuple):
    """The tokens of each document occupy adjacent columns, so that their positions differ as their columns do.

    `start` is the index of the first column, counted from the beginning of the stream. Rows may be at different
    positions, and may hold several documents, one after the other.
    """

    start: int


@dataclass(frozen=True)
class PackedLayout:
    """The documents of packed rows as (row, first column, column after the last); all other columns are padding.

    They are in the order of rows and columns. `ids` are their segment ids, None where they are not known. Each document
    is whole, so that its positions count from 0, and no two of a row have the same id. It is no tuple: trees of tensors
    are mapped over, and end here."""

    documents: tuple[tuple[int, int, int], ...]
    ids: tuple[int, ...] | None = field(default=None, compare=False)

    @cached_property
    def most_in_row(self) -> int:
        """The largest number of documents of a row."""
        return max(Counter(row for row, _, _ in self.documents).values(), default=0)

    @cached_property
    def longest(self) -> int:
        """The number of tokens of the longest document."""
        return max((stop - start for _, start, stop in self.documents), default=0)

    @cached_property
    def token_count(self) -> int:
        """The number of tokens that are not padding."""
        return sum(stop - start for _, start, stop in self.documents)

    @property
    def distinct_ids(self) -> list[int] | None:
        """The segment ids that occur in any row, in ascending order."""
        if self.ids is None:
            return None
        return sorted(set(self.ids))

    def ids_of_rows(self, rows: int) -> list[list[int]] | None:
        """The segment ids of each of so many rows, in ascending order."""
        if self.ids is None:
            return None
        by_row: list[list[int]] = [[] for _ in range(rows)]
        for (row, _, _), document in zip(self.documents, self.ids):
            by_row[row].append(document)
        return [sorted(ids) for ids in by_row]

    def repeated(self, times: int) -> "PackedLayout":
        """The layout of rows in which so many tokens stand for each."""
        documents = tuple((row, times * start, times * stop) for row, start, stop in self.documents)
        return PackedLayout(documents, self.ids)

    @property
    def right_padded(self) -> bool:
        """Whether each row holds at most one document, which begins in the first column."""
        rows = [row for row, _, _ in self.documents]
        return len(set(rows)) == len(rows) and all(begin == 0 for _, begin, _ in self.documents)


class PrefixedLayout(NamedTuple):
    """The first `prefix` columns are summary tokens or padding; the text follows, with the layout `text_layout`.

    If `text_layout` is `ContiguousLayout()`, there is no padding and summary i is at position i; it summarizes part i
    of the text where parts have `part_length` tokens each, and no part where `part_length` is None."""

    prefix: int
    text_layout: ContiguousLayout | None = None
    part_length: int | None = None


class RingLayout(NamedTuple):
    """Keys in a ring by position modulo `slots`, of rows that are one contiguous document each, up to `position`.

    Keys that are never evicted follow the ring, from the first of the document on."""

    position: int
    slots: int


@dataclass(frozen=True, eq=False)
class StepLayout:
    """One token per row that continues its document, at a place that only tensors know: the host must not read it.

    Layers store the token in `column` of their caches, the same of every row, which have a column for each of `keys`:
    the tokens so far and the new one; unused columns are padding. Positions are below `position_limit`. `masks` are the
    dense masks of `keys` that the layers of one step share."""

    column: Int[Tensor, " b"]
    keys: "TokenPositions"
    position_limit: int
    masks: dict[Any, Tensor] = field(default_factory=dict)


class DependencyTree(NamedTuple):
    """The node of each token in the dependency tree of its document; -1 in all three fields for a token in no tree.

    `depth` counts the edges to the root, `preorder` numbers the nodes of a document's tree in preorder, and
    `last_descendant` is the highest number in the subtree of the token's node: token i is of the same node as j or of
    one of its descendants where preorder_j <= preorder_i <= last_descendant_j.
    `manyformer.nn.structures.dependency_trees.preorder_columns` computes the three from heads."""

    depth: Int[Tensor, "b l"]
    preorder: Int[Tensor, "b l"]
    last_descendant: Int[Tensor, "b l"]


class GraphEdges(NamedTuple):
    """The directed edges of all graphs of a batch, sorted by target (compressed sparse rows).

    Node l of row b has the number b * length + l, and `row_starts[n]` is the index of the first edge that ends at node
    n. An edge carries a message from its source to its target; `features` are vectors of the edges, None for none."""

    sources: Int[Tensor, " edges"]
    targets: Int[Tensor, " edges"]
    row_starts: Int[Tensor, " nodes_and_one"]
    features: Float[Tensor, "edges f"] | None = None


GLOBAL_ROLE = 1
"""The role of a global token: it attends to all tokens and all attend to it, where the mask uses roles."""

SUMMARY_ROLE = -1
"""The role of a summary token, which precedes a text and belongs to none; tokens of a text never have it."""


class FirstValues:
    """The values of the lowest attention layer of one call, which it leaves here for the layers above."""

    def __init__(self) -> None:
        self.values: Float[Tensor, "b g l f"] | None = None


class TokenPositions(NamedTuple):
    """Positions, documents and roles of tokens; caches, memories and gathers carry them along with the tokens.

    `position_ids` is the position within the token's document, `segment_ids` the document within the row
    (`PADDING_SEGMENT` for padding); a token attends only to its own segment. `layout` states what is known about both
    without reading the tensors, which lets a kernel select its fastest exact path; None states nothing. `tree` is set
    where the model was given dependency trees, `edges` where tokens are nodes of graphs, `pair_scores` where a model
    computes the scores of each query with all tokens of its row once for all layers. `roles` is a number that masks
    may select, such as `GLOBAL_ROLE`; None means 0 for every token. `part_ids` is the part of its document, such as a
    sentence, that a token belongs to, -1 or None for no part. `token_ids` are set where a layer looks tokens up
    (`reads_token_ids`), `first_values` where layers read the values of the lowest one (`reads_first_values`)."""

    position_ids: Int[Tensor, "b l"]
    segment_ids: Int[Tensor, "b l"]
    layout: ContiguousLayout | AlignedLayout | PackedLayout | PrefixedLayout | RingLayout | StepLayout | None = None
    tree: DependencyTree | None = None
    roles: Int[Tensor, "b l"] | None = None
    part_ids: Int[Tensor, "b l"] | None = None
    edges: GraphEdges | None = None
    pair_scores: Float[Tensor, "b l h s"] | None = None
    token_ids: Int[Tensor, "b l"] | None = None
    first_values: FirstValues | None = None

    def of_tokens(self, token_ids: Int[Tensor, "b l"]) -> "TokenPositions":
        """These positions with the tokens at them."""
        # the compiler of torch 2.11 cannot keep tuples that `_replace` has made
        return TokenPositions(*self[:8], token_ids, self.first_values)

    def with_first_values(self) -> "TokenPositions":
        """These positions with a place for the values of the lowest layer."""
        return TokenPositions(*self[:9], FirstValues())

    def same_document(self, keys: "TokenPositions") -> Bool[Tensor, "b l s"]:
        """Whether each of the `keys` is a token of the document of each token here; never for padding."""
        key_segments = keys.segment_ids[:, None]
        # padding has an id of its own, and would be a document by itself
        return (self.segment_ids[:, :, None] == key_segments) & (key_segments != PADDING_SEGMENT)

    def columns(self, start: int, stop: int) -> "TokenPositions":
        """The positions of the tokens in the columns `start` to `stop` - 1, without edges, which join whole rows."""
        tree = None
        if self.tree is not None:
            tree = DependencyTree(*(part[:, start:stop] for part in self.tree))
        current = self.layout
        layout = None
        if isinstance(current, ContiguousLayout | AlignedLayout):
            # columns of a row stay adjacent, while documents of packed rows may be cut
            layout = type(current)(current.start + start)
        optional = (self.roles, self.part_ids, self.pair_scores, self.token_ids)
        roles, parts, pair_scores, tokens = (None if field is None else field[:, start:stop] for field in optional)
        position_ids = self.position_ids[:, start:stop]
        segment_ids = self.segment_ids[:, start:stop]
        return TokenPositions(position_ids, segment_ids, layout, tree, roles, parts, None, pair_scores, tokens)


def contiguous_positions(rows: int, start: int, stop: int, device: torch.device) -> TokenPositions:
    """The positions `start` to `stop` - 1 of rows that are one document without padding each."""
    position_ids = torch.arange(start, stop, device=device).expand(rows, -1)
    segment_ids = torch.zeros((), dtype=torch.long, device=device).expand(rows, stop - start)
    return TokenPositions(position_ids, segment_ids, ContiguousLayout(start))


class LayerOutput(NamedTuple):
    """What a layer returns: the stream, the next state, and the sum of auxiliary losses (ponder cost, span penalty)."""

    y: Float[Tensor, "b l d"]
    state: State = None
    loss: Tensor | float = 0.0


class MemorySequence(NamedTuple):
    """Another sequence that a layer may attend to, such as an encoder's output."""

    y: Float[Tensor, "b s d"]
    positions: TokenPositions


@dataclass(frozen=True, slots=True)
class Context:
    """What all layers of one call share; nothing that only one model needs may be added."""

    positions: TokenPositions
    memory: MemorySequence | None = None
    watch: WatchFn = no_watch


class RecordModule(nn.Module):
    """A module that returns a record, for which a forward hook may return the record's first field alone.

    That is the stream of a layer and the logits of a model: `lambda module, inputs, output: output[0] * 0` replaces it
    and leaves the rest. A hook that returns anything else but a whole record is refused where it was called."""

    def register_forward_hook(
        self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False, always_call: bool = False
    ) -> RemovableHandle:
        return super().register_forward_hook(
            _RecordHook(hook), prepend=prepend, with_kwargs=with_kwargs, always_call=always_call
        )


@final
class _RecordHook:
    """A forward hook whose result becomes a record."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, module: nn.Module, *call: Any) -> Any:
        result = self.hook(module, *call)
        # after the inputs, by position and perhaps by name
        output = call[-1]
        fields = getattr(output, "_fields", None)
        if result is None or fields is None or isinstance(result, type(output)):
            return result
        if isinstance(result, Tensor):
            return output._replace(**{fields[0]: result})
        if isinstance(result, tuple) and len(result) == len(fields):
            return type(output)(*result)
        if isinstance(result, tuple):
            kind = f"{len(result)} values"
        else:
            kind = f"an object of {type(result).__name__}"
        raise TypeError(
            f"a forward hook of {type(module).__name__} returned {kind}: it may return a tensor in place of "
            f"{fields[0]}, or output._replace({fields[0]}=...), as the output is a "
            f"{type(output).__name__}({', '.join(fields)})"
        )


class Layer(RecordModule, ABC):
    """A module that changes the residual stream: attention, a mixer, a feed-forward layer, an entire stack."""

    key_origin: KeyOrigin = "stream"
    """What the keys are made of whose weights it, or a part of it, reports to `ctx.watch`."""

    recomputes: bool = False
    """Whether it stores no activations, because it recomputes all of its layers together in the backward pass."""

    entries: tuple[str, ...] = ()
    """Methods beside `forward` by which its stack calls it; sharded weights are gathered for these, too."""

    largest_count: int | None = None
    """The most steps, or layers, of a token, for a layer that reports to `ctx.watch` how many each token passes."""

    keeps_tokens: bool = True
    """Whether its state depends on the stream; if not, tokens whose outputs nobody reads change nothing."""

    reads_token_ids: bool = False
    """Whether it looks up the tokens themselves, below the embedding, as a module that is no layer may too."""

    no_static_step: str | None = None
    """Why the operators of its decoding steps cannot be the same at every step; None if they can."""

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        """The state before any token; `capacity` preallocates buffers for that many tokens, written in place."""
        return ()

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        """Apply the layer; a `state` is continued and the next state returned, with None no state is kept."""

    def extend_state(self, x: Float[Tensor, "b l d"], ctx: Context, state: State) -> State:
        """The next state after tokens whose outputs nobody reads: by default what `forward` returns with them."""
        return self(x, ctx, state).state

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, ctx: Context, state: State = None) -> LayerOutput: ...


@final
class Pointwise(Layer):
    """A module that processes each token independently, as a layer: a final norm, a projection."""

    keeps_tokens = False

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        return LayerOutput(self.inner(x), state)


class LayeredStack(Layer):
    """A layer made of layers, whose intermediate outputs are available for auxiliary losses."""

    @abstractmethod
    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        """The output of every layer in order, without a state; the last one equals the result of `forward`."""


class NamedLayers(Layer):
    """Layers named by their keywords: the names become part of the checkpoint. Its state is a list of theirs.

    A layer that is given several times is registered under its first name, and has a state in each of its places."""

    places: dict[str, str] | None = None
    """The name under which the layer of each place is registered, in order; None if all layers differ."""

    def __init__(self, **layers: Layer) -> None:
        super().__init__()
        first_names: dict[Layer, str] = {}
        for name, layer in layers.items():
            if first_names.setdefault(layer, name) == name:
                self.add_module(name, layer)
        if len(first_names) < len(layers):
            self.places = {name: first_names[layer] for name, layer in layers.items()}
            self.register_load_state_dict_pre_hook(_drop_repeated_places)  # type: ignore[no-untyped-call]

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return [layer.init_state(batch, capacity=capacity, device=device, dtype=dtype) for layer in self.in_order()]

    def in_order(self) -> Iterable[Layer]:
        """The layers in their order, each as often as it is applied."""
        if self.places is not None:
            return [self._modules[name] for name in self.places.values()]  # type: ignore[misc]
        # `children()` removes duplicates first, which takes longer than a small layer needs for one token
        return self._modules.values()  # type: ignore[return-value]


def _drop_repeated_places(layers: NamedLayers, state: dict[str, Any], prefix: str, *details: Any) -> None:
    """Take the tensors of further places out of a state dict of an earlier version, which named a layer in each.

    Tensors that are not those of the first place are left, so that loading refuses them."""
    for place, name in (layers.places or {}).items():
        first = f"{prefix}{name}."
        further = f"{prefix}{place}."
        for key in [key for key in state if place != name and key.startswith(further)]:
            tensor = state.get(first + key.removeprefix(further))
            if tensor is state[key] or (tensor is not None and torch.equal(tensor, state[key])):
                del state[key]


@final
class Chain(NamedLayers, LayeredStack):
    """Layers applied in sequence."""

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        loss: Tensor | float = 0.0
        next_states: list[State] = []
        for index, layer in enumerate(self.in_order()):
            x, next_state, layer_loss = layer(x, ctx, None if state is None else state[index])
            next_states.append(next_state)
            # a number as long as no layer has a loss, which spares small layers an operator each
            loss = loss + layer_loss
        return LayerOutput(x, None if state is None else next_states, loss)

    def extend_state(self, x: Float[Tensor, "b l d"], ctx: Context, state: State) -> State:
        next_states = list(state)
        layers = list(self.in_order())
        # the layers above keep nothing of the stream, so that nobody reads what comes out of this one
        last = max((index for index, layer in enumerate(layers) if layer.keeps_tokens), default=-1)
        for index, layer in enumerate(layers[: last + 1]):
            if index == last:
                next_states[index] = layer.extend_state(x, ctx, state[index])
            else:
                x, next_states[index], _ = layer(x, ctx, state[index])
        return next_states

    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        outputs: list[LayerOutput] = []
        for layer in self.in_order():
            outputs.append(layer(x, ctx))
            x = outputs[-1].y
        return outputs


@final
class ParallelLayers(NamedLayers):
    """The sum of the outputs of layers with the same input.

    For attention it equals one layer with all heads, whose output projection is split by heads.
    """

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        layers = list(self.in_order())
        if state is None:
            states = [None] * len(layers)
        else:
            states = state
        outs = [layer(x, ctx, layer_state) for layer, layer_state in zip(layers, states)]
        y = outs[0].y
        loss = outs[0].loss
        for out in outs[1:]:
            y = y + out.y
            loss = loss + out.loss
        return LayerOutput(y, None if state is None else [out.state for out in outs], loss)


def apply_layer(layer: Layer, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
    """`layer(x, ctx, state)`; a batch without any token stays as it is: many operations refuse empty tensors."""
    if x.numel():
        return layer(x, ctx, state)
    return LayerOutput(x, state)


def state_bytes(state: State) -> int:
    """The size of all tensors of a state in bytes."""
    # `tree_map` wants a tensor for each tensor, which is why the sizes are collected beside it
    sizes: list[int] = []

    def record_size(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    tree_map(record_size, state)
    return sum(sizes)
