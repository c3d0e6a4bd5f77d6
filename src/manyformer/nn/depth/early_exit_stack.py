"""The early-exit stack: a token exits after the layer that its exit rule selects and is copied to the layers above.

`EarlyExit` computes all layers and is the definition. `EarlyExitStep`, for one new token per row, does not run a layer
that no token reaches: the copied streams of such tokens are pending. When a token next reaches the layer, they enter
its state first, of which `Layer.extend_state` computes no more than later tokens need, such as keys and values.
"""

from collections.abc import Sized
from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from manyformer.nn.core import (
    Chain,
    Context,
    ContiguousLayout,
    Layer,
    LayeredStack,
    LayerOutput,
    Pointwise,
    State,
    TokenPositions,
    contiguous_positions,
    tree_map,
)
from manyformer.nn.decoding.bound_step import DecodeStep, bind_step, forward_step
from manyformer.nn.depth.exit_rules import (
    ExitRule,
    ExitRuleInput,
    LayerClassifiers,
    NeverExit,
    RandomExit,
    append_exit_layer,
)

ROWS_PER_COPY = 4
"""A layer computes all rows, unless one row in so many reaches it: the state of these few is copied."""


class EarlyExitState(NamedTuple):
    """The layers' states, and the copied streams of tokens that upper layers have not processed yet.

    `columns` is the number of tokens so far, of which each layer has processed `filled`; `pending` holds all of them,
    where layers are skipped, in `capacity` columns if that is not None. Only `EarlyExitStep` skips layers, the
    stack itself never does.
    """

    layers: list[State]
    columns: int
    filled: tuple[int, ...]
    pending: Float[Tensor, "b n d"] | None = None
    capacity: int | None = None


@final
class EarlyExit(LayeredStack):
    """A `Chain` whose tokens may exit after any of its numbered layers (Elbayad et al. 2020; Schuster et al. 2022).

    `rule` selects the tokens that exit. The layers above receive a copy of an exited token's hidden state, from which
    each computes its keys and values (Elbayad et al. 2020, section 3.1, equation 6); their other results for it are
    unused. Here every layer computes all tokens and copies replace unused results: this is the reference, which saves
    no computation.

    In training all tokens pass all layers; with `mixed_samples` there are that many passes with random exits ("mixed
    training", section 3.1). The output has one more channel: the number of the layer, from 1, after which the token
    exited; watchers receive it as "depth". Further layers of the chain, such as a final norm, are applied to all exits.
    Raises ValueError for a chain whose further layers mix tokens.
    """

    content_based = True
    no_static_step = "tokens leave an early-exit stack at different layers, which the host has to learn"

    def __init__(self, chain: Chain, rule: ExitRule, *, mixed_samples: int | None = None) -> None:
        super().__init__()
        layer_names = [name for name, _ in chain.named_children() if name.isdigit()]
        final_layers = [(name, layer) for name, layer in chain.named_children() if not name.isdigit()]
        for name, layer in final_layers:
            if not isinstance(layer, Pointwise):
                raise ValueError(
                    f"early exit needs position-wise layers after the numbered ones, and the stack has '{name}', a "
                    f"{type(layer).__name__}, which may mix tokens"
                )
        for name, layer in chain.named_children():
            self.add_module(name, layer)
        self.rule = rule
        self.mixed_samples = mixed_samples
        self.depth = self.largest_count = len(layer_names)
        self._layer_names = layer_names
        self._final_names = [name for name, _ in final_layers]

    @property
    def layers(self) -> list[Layer]:
        """The layers after which tokens may exit."""
        return [self._modules[name] for name in self._layer_names]  # type: ignore[misc]

    @property
    def final_layers(self) -> list[Layer]:
        """The layers between the exits and the classifiers."""
        return [self._modules[name] for name in self._final_names]  # type: ignore[misc]

    def classifier_input(self, x: Float[Tensor, "b l d"], ctx: Context) -> Float[Tensor, "b l d"]:
        """The input of the classifiers for a stream that exits."""
        for layer in self.final_layers:
            x = layer(x, ctx).y
        return x

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        states = [layer.init_state(batch, capacity=capacity, device=device, dtype=dtype) for layer in self.layers]
        return EarlyExitState(states, 0, (0,) * self.depth, None, capacity)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        if not self.training:
            return self._run_layers(x, ctx, state, self.rule)
        return self._run_layers(x, ctx, state, NeverExit() if self.mixed_samples is None else RandomExit(self.depth))

    def layer_outputs(self, x: Float[Tensor, "b l d"], ctx: Context) -> list[LayerOutput]:
        """The outputs that the training losses are computed from, in the form of `forward`'s output.

        These are the outputs of all layers; in mixed training, those of the random passes. In evaluation mode the
        output of `forward` comes last.
        """
        if self.mixed_samples is not None:
            passes = [self(x, ctx) for _ in range(self.mixed_samples if self.training else 1)]
            return [out._replace(loss=out.loss / len(passes)) for out in passes]
        outputs: list[LayerOutput] = []
        stream = x
        for number, layer in enumerate(self.layers, 1):
            stream, _, loss = layer(stream, ctx)
            outputs.append(LayerOutput(append_exit_layer(self.classifier_input(stream, ctx), number), None, loss))
        if self.training:
            return outputs
        return [*outputs, self(x, ctx)._replace(loss=0.0)]

    def _run_layers(self, x: Float[Tensor, "b l d"], ctx: Context, state: State, rule: ExitRule) -> LayerOutput:
        filled_state = None
        if state is not None:
            filled_state = self.fill_layers(state, ctx)
        plan = rule.init_plan(ctx, x)
        depth = torch.full(x.shape[:2], self.depth, device=x.device)
        loss: Tensor | float = 0.0
        next_states: list[State] = []
        position_ids = ctx.positions.position_ids.expand(x.shape[0], -1)
        for number, layer in enumerate(self.layers, 1):
            y, next_state, layer_loss = layer(x, ctx, None if filled_state is None else filled_state.layers[number - 1])
            # a token that has exited goes on as a copy of itself
            y = torch.where((depth < number)[..., None], x, y)
            if number < self.depth:
                exits, plan, _ = rule(ExitRuleInput(number, y, x, self.classifier_input(y, ctx), position_ids), plan)
                depth = torch.where(exits & (depth > number), number, depth)
            x = y
            loss = loss + layer_loss
            next_states.append(next_state)
        ctx.watch(self, "depth", depth)
        # the number of the layer travels in the stream, by which the head finds the classifier of each token
        y = torch.cat([self.classifier_input(x, ctx), depth[..., None].to(x.dtype)], dim=-1)
        if filled_state is None:
            return LayerOutput(y, None, loss)
        # these tokens have passed all layers, so that no copies are pending
        total = filled_state.columns + x.shape[1]
        next_state = EarlyExitState(next_states, total, (total,) * self.depth, None, filled_state.capacity)
        return LayerOutput(y, next_state, loss)

    def fill_layers(self, state: EarlyExitState, ctx: Context) -> EarlyExitState:
        """The state after every layer has processed its pending tokens."""
        if state.pending is None or min(state.filled) == state.columns:
            return state
        layers = [self.fill_layer(index, state, ctx) for index in range(self.depth)]
        return state._replace(layers=layers, filled=(state.columns,) * self.depth)

    def fill_layer(self, index: int, state: EarlyExitState, ctx: Context) -> State:
        """The state of layer number `index`, counted from 0, after its pending tokens."""
        start = state.filled[index]
        stop = state.columns
        pending = state.pending
        if pending is None or start == stop:
            return state.layers[index]
        positions = contiguous_positions(pending.shape[0], start, stop, pending.device)
        return self.layers[index].extend_state(
            pending[:, start:stop], Context(positions, ctx.memory), state.layers[index]
        )

    def extra_repr(self) -> str:
        passes = ""
        if self.mixed_samples is not None:
            passes = f", {self.mixed_samples} random passes in training"
        return f"{self.depth} layers{passes}"


@runtime_checkable
class ExitHead(LayerClassifiers, Protocol):
    """Output classifiers: one for all layers if `per_layer` is empty."""

    @property
    def per_layer(self) -> Sized: ...

    def __call__(self, x: Tensor) -> Tensor:
        """The logits of a stack's output, whose last channel is the number of the exit layer."""


@final
class EarlyExitStep:
    """From embedded tokens (r, 1, d) to the logits of the layers where they exit, and the next state."""

    def __init__(self, body: EarlyExit, head: ExitHead) -> None:
        self.body = body
        self.head = head
        self.forward = forward_step(body)
        self.steps = list(map(bind_step, body.layers))
        self.final_steps = list(map(bind_step, body.final_layers))

    def __call__(self, x: Tensor, ctx: Context, state: EarlyExitState) -> tuple[Tensor, State]:
        layout = ctx.positions.layout
        # layouts are tuples, of which different kinds may be equal
        if not isinstance(layout, ContiguousLayout) or layout.start != state.columns:
            y, next_state = self.forward(x, ctx, state)
            return self.head(y), next_state
        rule = self.body.rule
        column = state.columns
        depth = len(self.steps)
        plan = rule.init_plan(ctx, x)
        rows = None
        states = list(state.layers)
        filled = list(state.filled)
        exits = _ExitLogits(self.head)
        for number, step in enumerate(self.steps, 1):
            hidden = x
            filled[number - 1] = column + 1
            filled_state = self.body.fill_layer(number - 1, state, ctx)
            if rows is None or ROWS_PER_COPY * len(rows) > len(x):
                y, states[number - 1] = step(x, ctx, filled_state)
                y = y if rows is None else y[rows]
            else:
                # few rows are left: only these are computed, while the state is extended for all of them
                y = _step_of_rows(step, rows, x, ctx, filled_state)
                states[number - 1] = self.body.layers[number - 1].extend_state(x, ctx, filled_state)
            x = y if rows is None else x.index_copy(0, rows, y)
            if number < depth and not rule.applies_after(number):
                continue
            hidden = hidden if rows is None else hidden[rows]
            classifier_input = self._classifier_input(y, ctx)
            if number == depth:
                exits.add(rows, number, classifier_input, None)
                break
            position_ids = ctx.positions.position_ids[:1].expand(len(y), -1)
            decision = rule(ExitRuleInput(number, y, hidden, classifier_input, position_ids), plan)
            plan = decision.plan
            leaving = decision.exits[:, 0].nonzero()[:, 0]
            if not len(leaving):
                continue
            logits = None
            if decision.logits is not None:
                logits = decision.logits[leaving]
            exits.add(leaving if rows is None else rows[leaving], number, classifier_input[leaving], logits)
            # nobody is left for the layers above, whose states catch up when a token reaches them
            if len(leaving) == len(y):
                break
            staying = (~decision.exits[:, 0]).nonzero()[:, 0]
            rows = staying if rows is None else rows[staying]
            plan = None if plan is None else plan[staying]
        pending = _append_pending(state, x)
        return exits.logits(), EarlyExitState(states, column + 1, tuple(filled), pending, state.capacity)

    def _classifier_input(self, x: Tensor, ctx: Context) -> Tensor:
        for step in self.final_steps:
            x, _ = step(x, ctx, None)
        return x


def _step_of_rows(step: DecodeStep, rows: Tensor, x: Tensor, ctx: Context, state: State) -> Tensor:
    """The outputs of these rows alone, with their part of the state."""
    position_ids, segment_ids = (ids[:1].expand(len(rows), -1) for ids in ctx.positions[:2])
    positions = TokenPositions(position_ids, segment_ids, ctx.positions.layout)
    if ctx.positions.token_ids is not None:
        positions = positions.of_tokens(ctx.positions.token_ids[rows])
    memory, own_state = tree_map(lambda tensor: tensor.index_select(0, rows), (ctx.memory, state))
    return step(x[rows], Context(positions, memory), own_state)[0]


def _append_pending(state: EarlyExitState, x: Tensor) -> Tensor:
    """The pending streams with those that the newest tokens leave to the layers above."""
    column = state.columns
    pending = state.pending
    if pending is None:
        pending = x.new_zeros(x.shape[0], column if state.capacity is None else state.capacity, x.shape[2])
    if state.capacity is None:
        return torch.cat([pending, x], 1)
    pending.narrow(1, column, 1).copy_(x)
    return pending


@final
class _ExitLogits:
    """Collects the logits of all rows; rows with the same classifier share one product."""

    def __init__(self, head: ExitHead) -> None:
        self.head = head
        self.last_layer = len(head.per_layer) + 1
        self.exits: list[tuple[Tensor | None, Tensor, Tensor | None]] = []

    def add(self, rows: Tensor | None, number: int, classifier_input: Tensor, logits: Tensor | None) -> None:
        """Add rows that exit after layer `number`, with their logits if the exit rule computed them."""
        if logits is None and len(self.head.per_layer):
            logits = self.head.logits_at(classifier_input, number)
        self.exits.append((rows, classifier_input, logits))

    def logits(self) -> Tensor:
        """The logits of all rows in their order."""
        parts = [logits for *_, logits in self.exits if logits is not None]
        if len(parts) < len(self.exits):
            inputs = [classifier_input for _, classifier_input, logits in self.exits if logits is None]
            # one product for all rows whose exit rule had no logits
            product = self.head.logits_at(torch.cat(inputs), self.last_layer)
            computed = iter(product.split_with_sizes([len(part) for part in inputs]))
            parts = [next(computed) if logits is None else logits for *_, logits in self.exits]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)[torch.cat([rows for rows, *_ in self.exits if rows is not None]).argsort()]
