"""A stack that owns what flows between layers: a rule says what each branch reads, and where its output is written.

A layer sees one stream. What reads further back, such as the embedding or the output of a layer far below, several
streams side by side or the outputs of all branches, is a `StreamRule` of the stack around the layers.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import (
    Context,
    Layer,
    LayeredStack,
    LayerOutput,
    NamedLayers,
    Pointwise,
    State,
    no_watch,
)
from manyformer.nn.residual import Residual

S = TypeVar("S", bound=tuple[Any, ...])
"""What flows between branches: a named tuple of tensors, or of tuples of them, as the rule defines it."""


class BranchPlace(NamedTuple):
    """The place of a branch: the number of its layer, its number in the layer, which has `branches` of them."""

    layer: int
    branch: int
    branches: int

    @property
    def is_first(self) -> bool:
        """Whether it is the first branch of its layer."""
        return self.branch == 0

    @property
    def is_last(self) -> bool:
        """Whether it is the last branch of its layer."""
        return self.branch == self.branches - 1


class StreamRule(nn.Module, ABC, Generic[S]):
    """What the branches of a stack read, and how their outputs change what flows on. It acts on each token alone.

    It therefore has no state: rows, documents and pieces of a text need nothing of it."""

    layers_are_alike: ClassVar[bool] = True
    """Whether a compiled layer serves for all; it does not where each has modules, or another number of streams."""

    @abstractmethod
    def start(self, x: Float[Tensor, "b l d"]) -> S:
        """The streams below the first layer."""

    @abstractmethod
    def read(self, streams: S, place: BranchPlace) -> tuple[Float[Tensor, "b l d"], S]:
        """What the branch reads, before its norm, and the streams that its output is written to."""

    @abstractmethod
    def write(self, streams: S, place: BranchPlace, y: Float[Tensor, "b l d"]) -> S:
        """The streams with the output of the branch."""

    @abstractmethod
    def finish(self, streams: S) -> Float[Tensor, "b l d"]:
        """One stream of them: what a norm, a head or a reader of this layer's output gets."""


@final
class StreamLayer(NamedLayers):
    """The residual branches of one layer, of which a rule decides what they read; without one they are added in turn.

    Raises ValueError for a branch that is not only added, such as one with a norm after the sum."""

    def __init__(self, **branches: Layer) -> None:
        super().__init__(**branches)
        for name, part in branches.items():
            if not isinstance(part, Residual) or not part.only_adds:
                raise ValueError(
                    f"branch {name}: the rule of the stack writes what a branch adds, so its norms must be inside "
                    "(norm_order='pre' or 'sandwich')"
                )

    # called as a module with further arguments, so that layers can be recomputed, sharded and hooked one by one
    def forward(
        self, x: Any, ctx: Context, state: State = None, rule: StreamRule[Any] | None = None, number: int = 0
    ) -> LayerOutput:
        streams = x
        next_states: list[State] = []
        loss: Tensor | float = 0.0
        for index, branch in enumerate(self.branches()):
            place = BranchPlace(number, index, len(self._modules))
            if rule is None:
                branch_input = streams
            else:
                branch_input, streams = rule.read(streams, place)
            y, next_state, branch_loss = branch.summand(branch_input, ctx, None if state is None else state[index])
            streams = streams + y if rule is None else rule.write(streams, place, y)
            next_states.append(next_state)
            loss = loss + branch_loss
        return LayerOutput(streams, None if state is None else next_states, loss)

    if TYPE_CHECKING:

        def __call__(
            self, x: Any, ctx: Context, state: State = None, rule: StreamRule[Any] | None = None, number: int = 0
        ) -> LayerOutput: ...

    def branches(self) -> Iterator[Residual]:
        """The branches in their order."""
        yield from self.in_order()  # type: ignore[misc]


@final
class StreamStack(LayeredStack):
    """Numbered layers of residual branches, between which streams flow by a rule; a `Chain` is the rule of plain sums.

    Layers before the numbered ones are applied to the input, those behind them to the one stream that the rule makes of
    all in the end; the latter must be position-wise. The state is the list of the layers' states. Where layers mix
    values with those of the lowest one (`reads_first_values`), the stack hands these on. Watchers get the stream that
    the rule makes after each numbered layer as "stream". Raises ValueError for layers in another order."""

    def __init__(self, rule: StreamRule[Any], /, **layers: Layer) -> None:
        super().__init__()
        numbers = [position for position, name in enumerate(layers) if name.isdigit()]
        if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            raise ValueError(f"the layers of a stack need numbers that follow one another, not {', '.join(layers)}")
        for name, layer in layers.items():
            if name.isdigit() and not isinstance(layer, StreamLayer):
                raise ValueError(f"layer {name} ({type(layer).__name__}) must be a StreamLayer of residual branches")
            self.add_module(name, layer)
        names = list(layers)
        self._first = names[: numbers[0]]
        self._numbered = names[numbers[0] : numbers[-1] + 1]
        self._last = names[numbers[-1] + 1 :]
        for name in self._last:
            if not isinstance(layers[name], Pointwise):
                raise ValueError(f"layer {name} follows the numbered ones, so it must be position-wise")
        self.rule = rule
        self.hands_on_values = any(getattr(module, "reads_first_values", False) for module in self.modules())

    @property
    def first_layers(self) -> list[Layer]:
        """The layers below the streams."""
        return [self._modules[name] for name in self._first]  # type: ignore[misc]

    @property
    def numbered_layers(self) -> list[StreamLayer]:
        """The layers between which the streams flow."""
        return [self._modules[name] for name in self._numbered]  # type: ignore[misc]

    @property
    def last_layers(self) -> list[Layer]:
        """The position-wise layers above the streams."""
        return [self._modules[name] for name in self._last]  # type: ignore[misc]

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        layers = [*self.first_layers, *self.numbered_layers]
        return [layer.init_state(batch, capacity=capacity, device=device, dtype=dtype) for layer in layers]

    def context(self, ctx: Context) -> Context:
        """The context of one pass of the layers."""
        if not self.hands_on_values:
            return ctx
        return replace(ctx, positions=ctx.positions.with_first_values())

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        ctx = self.context(ctx)
        states = iter([None] * len(self._modules) if state is None else state)
        next_states: list[State] = []
        loss: Tensor | float = 0.0
        for layer in self.first_layers:
            x, next_state, layer_loss = layer(x, ctx, next(states))
            next_states.append(next_state)
            loss = loss + layer_loss
        streams = self.rule.start(x)
        for number, layer in enumerate(self.numbered_layers):
            streams, next_state, layer_loss = layer(streams, ctx, next(states), self.rule, number)
            next_states.append(next_state)
            loss = loss + layer_loss
            if ctx.watch is not no_watch:
                # what a reader of this layer would see: streams themselves are the rule's own
                ctx.watch(layer, "stream", self.rule.finish(streams))
        x = self.rule.finish(streams)
        for layer in self.last_layers:
            x = layer(x, ctx).y
        return LayerOutput(x, None if state is None else next_states, loss)

    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        ctx = self.context(ctx)
        loss: Tensor | float = 0.0
        for layer in self.first_layers:
            x, _, layer_loss = layer(x, ctx)
            loss = loss + layer_loss
        outputs: list[LayerOutput] = []
        streams = self.rule.start(x)
        for number, layer in enumerate(self.numbered_layers):
            streams, _, layer_loss = layer(streams, ctx, None, self.rule, number)
            outputs.append(LayerOutput(self.rule.finish(streams), None, loss + layer_loss))
            loss = 0.0
        for layer in self.last_layers:
            outputs.append(layer(outputs[-1].y, ctx))
        return outputs
