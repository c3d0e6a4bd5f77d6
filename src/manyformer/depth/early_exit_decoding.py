"""Incremental decoding with early exits: a layer that no token reaches is not run at all.

The copied streams of such tokens are pending. When a token next reaches the layer, they enter its state first, of which
`Layer.extend_state` computes no more than later tokens need, such as keys and values.
"""

from collections.abc import Sized
from typing import Protocol, final, runtime_checkable

import torch
from torch import Tensor

from manyformer.bound_step import DecodeStep, bind_step, forward_step
from manyformer.core import Context, ContiguousLayout, State, TokenPositions, tree_map
from manyformer.depth.early_exit_stack import EarlyExit, EarlyExitState
from manyformer.depth.exit_rules import ExitRuleInput, LayerClassifiers

ROWS_PER_COPY = 4
"""A layer computes all rows, unless one row in so many reaches it: the state of these few is copied."""


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
        self.steps, self.final_steps = (list(map(bind_step, layers)) for layers in (body.layers, body.final_layers))

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
            decision = rule.forward(ExitRuleInput(number, y, hidden, classifier_input, position_ids), plan)
            plan = decision.plan
            leaving = decision.exits[:, 0].nonzero()[:, 0]
            if not len(leaving):
                continue
            logits = None
            if decision.logits is not None:
                logits = decision.logits[leaving]
            exits.add(leaving if rows is None else rows[leaving], number, classifier_input[leaving], logits)
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
    memory, own_state = tree_map(lambda tensor: tensor.index_select(0, rows), (ctx.memory, state))
    return step(x[rows], Context(positions, memory), own_state)[0]


def _pending(state: EarlyExitState) -> Tensor:
    assert state.pending is not None
    return state.pending


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
            product = self.head.logits_at(torch.cat(inputs), self.last_layer)
            computed = iter(product.split_with_sizes([len(part) for part in inputs]))
            parts = [next(computed) if logits is None else logits for *_, logits in self.exits]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts)[torch.cat([rows for rows, *_ in self.exits if rows is not None]).argsort()]
