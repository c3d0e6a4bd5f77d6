"""Incremental decoding with early exits: what exited tokens do not need is not computed.

A layer that no row reaches is not run at all: the copied streams are pending, and become keys and values in a single
product when a row next reaches the layer. In a layer that some rows reach, all rows get keys and values, and only those
rows get the remaining results.
"""

from collections.abc import Sized
from typing import NamedTuple, Protocol, final, runtime_checkable

import torch
from torch import Tensor

from manyformer.attention import Attention
from manyformer.attention.attention_step import AttentionStep
from manyformer.binding import has_hooks
from manyformer.core import Chain, Context, DecodeStep, Layer, State, TokenPositions, bind_step, contiguous_positions
from manyformer.depth.early_exit_stack import EarlyExit, EarlyExitState
from manyformer.depth.exit_rules import ExitRuleInput, LayerClassifiers
from manyformer.feedforward import ChunkedLayer, FeedForward, GatedFeedForward
from manyformer.residual import Residual
from manyformer.sources.kv_source import StoredKeys


@runtime_checkable
class ExitHead(LayerClassifiers, Protocol):
    """Output classifiers: one for all layers if `per_layer` is empty."""

    @property
    def per_layer(self) -> Sized: ...

    def __call__(self, x: Tensor) -> Tensor:
        """The logits of a stack's output, whose last channel is the number of the exit layer."""


class _ActiveRows(NamedTuple):
    """The rows that reach a layer (None: all), the positions of their tokens, and what the call shares."""

    rows: Tensor | None
    positions: TokenPositions
    ctx: Context

    def select(self, part: Tensor | None) -> Tensor | None:
        """The active rows of a tensor of all rows, or of one row for all."""
        return part if part is None or self.rows is None or part.shape[0] == 1 else part.index_select(0, self.rows)

    def narrow(self, chosen: Tensor) -> "_ActiveRows":
        """The `chosen` ones of the active rows; all rows are at the same position."""
        rows = chosen if self.rows is None else self.rows[chosen]
        position_ids, segment_ids = (ids[:1].expand(len(rows), -1) for ids in self.positions[:2])
        return _ActiveRows(rows, TokenPositions(position_ids, segment_ids, self.positions.layout), self.ctx)


def early_exit_step(body: EarlyExit, head: ExitHead) -> DecodeStep | None:
    """From embedded tokens (r, 1, d) to logits and state; None if a layer cannot skip rows."""
    layers = early_exit_layers(body)
    return None if layers is None else _EarlyExitDecoder(body, head, layers)


def early_exit_layers(body: EarlyExit) -> "list[_ExitLayer] | None":
    """The layers of `body`, bound to their current parameters; None if one of them cannot skip rows."""
    layers = [_exit_layer(layer) for layer in body.layers]
    steps = [layer for layer in layers if layer is not None]
    return steps if len(steps) == len(layers) > 0 else None


@final
class _EarlyExitDecoder:
    def __init__(self, body: EarlyExit, head: ExitHead, layers: "list[_ExitLayer]") -> None:
        self.body, self.head, self.layers = body, head, layers
        self.final_steps = [bind_step(layer) for layer in body.final_layers]

    def __call__(self, x: Tensor, ctx: Context, state: EarlyExitState) -> tuple[Tensor, State]:
        if not self.layers[0].is_ready(ctx.positions, state.layers[0]):
            y, next_state, _ = self.body(x, ctx, state)
            return self.head(y), next_state
        rule, column = self.body.rule, state.columns
        active, plan, hidden = _ActiveRows(None, ctx.positions, ctx), rule.init_plan(ctx, x), x
        states, filled_columns, exits = list(state.layers), list(state.filled), _ExitLogits(self.head)
        for number, layer in enumerate(self.layers, 1):
            start = filled_columns[number - 1]
            missing = x if start == column else torch.cat([_pending(state)[:, start:column], x], 1)
            y, states[number - 1] = layer(missing, hidden, start, active, states[number - 1])
            filled_columns[number - 1] = column + 1
            x = y if active.rows is None else x.index_copy(0, active.rows, y)
            is_last = number == len(self.layers)
            if not is_last and not rule.applies_after(number):
                hidden = y
                continue
            classifier_input = self._classifier_input(y, ctx)
            if is_last:
                exits.add(active.rows, number, classifier_input, None)
                break
            position_ids = active.positions.position_ids.expand(len(y), -1)
            decision = rule.forward(ExitRuleInput(number, y, hidden, classifier_input, position_ids), plan)
            staying, leaving = ((~decision.exits[:, 0]).nonzero()[:, 0], decision.exits[:, 0].nonzero()[:, 0])
            hidden, plan = y, decision.plan
            if not len(leaving):
                continue
            logits = None if decision.logits is None else decision.logits[leaving]
            exits.add(active.narrow(leaving).rows, number, classifier_input[leaving], logits)
            if not len(staying):
                break
            hidden, plan, active = y[staying], None if plan is None else plan[staying], active.narrow(staying)
        pending = _append_pending(state, x)
        return exits.logits(), EarlyExitState(states, column + 1, tuple(filled_columns), pending, state.capacity)

    def _classifier_input(self, x: Tensor, ctx: Context) -> Tensor:
        for step in self.final_steps:
            x, _ = step(x, ctx, None)
        return x


def _pending(state: EarlyExitState) -> Tensor:
    assert state.pending is not None
    return state.pending


def _append_pending(state: EarlyExitState, x: Tensor) -> Tensor:
    """The pending streams with those that the newest tokens leave to the layers above."""
    column, pending = state.columns, state.pending
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
        self.head, self.last_layer = head, len(head.per_layer) + 1
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


def _exit_layer(layer: Layer) -> "_ExitLayer | None":
    """The layer, if it begins with cached self-attention and no later branch mixes the tokens of a row."""
    branches = [branch for branch in layer.children() if isinstance(branch, Residual)]
    if type(layer) is not Chain or len(branches) < len(list(layer.children())) or any(map(has_hooks, layer.modules())):
        return None
    attention = [branch.inner.decode_parts() if isinstance(branch.inner, Attention) else None for branch in branches]
    first, *others = attention
    if first is None or first.store is None or first.is_convolved:
        return None
    if not (first.store.takes_several and first.attend.stateless):
        return None
    for branch, parts in zip(branches[1:], others):
        is_cross_attention = parts is not None and parts.read_memory is not None and parts.attend.stateless
        if not (is_cross_attention or isinstance(branch.inner, FeedForward | GatedFeedForward | ChunkedLayer)):
            return None
    return _ExitLayer(branches, first, others)


@final
class _ExitLayer:
    """One layer: keys and values of all rows and pending tokens, everything else of the active rows only."""

    def __init__(self, branches: list[Residual], attention: AttentionStep, others: list[AttentionStep | None]) -> None:
        (self.pre_norm, self.join), self.attention = branches[0].decode_parts(), attention
        self.others = [
            (branch.decode_parts(), parts, bind_step(branch.inner)) for branch, parts in zip(branches[1:], others)
        ]

    def is_ready(self, positions: TokenPositions, state: list[State]) -> bool:
        """Whether the state of this layer, which no token has skipped, can take the next tokens."""
        return self.attention.is_ready(positions, state[0])

    def __call__(
        self, missing: Tensor, hidden: Tensor, start: int, active: _ActiveRows, state: list[State]
    ) -> tuple[Tensor, list[State]]:
        """The outputs of the active rows from `hidden`; `missing` are the inputs of all rows from column `start` on."""
        parts, rows, count = self.attention, *missing.shape[:2]
        normed = missing if self.pre_norm is None else self.pre_norm(missing)
        positions = active.ctx.positions
        if count > 1:
            positions = contiguous_positions(rows, start, start + count, missing.device)
        stored = parts.store_keys(*parts.project_kv(normed, positions), positions, state[0])
        newest = normed[:, -1:]
        x = self.join(hidden, _attend(parts, newest if active.rows is None else newest[active.rows], active, stored))
        next_states = [stored.state]
        for ((pre_norm, join), other, step), other_state in zip(self.others, state[1:]):
            normed = x if pre_norm is None else pre_norm(x)
            if other is None:
                branch, next_state = step(normed, active.ctx, other_state)
            else:
                stored = other.memory_keys(active.ctx, other_state)
                branch, next_state = _attend(other, normed, active, stored), stored.state
            x = join(x, branch)
            next_states.append(next_state)
        return x, next_states


def _attend(parts: AttentionStep, x: Tensor, active: _ActiveRows, stored: StoredKeys) -> Tensor:
    """Attention of the active rows to their part of the stored keys of all rows."""
    k, v, visible = active.select(stored.k), active.select(stored.v), active.select(stored.visible)
    assert k is not None
    assert v is not None
    y, _ = parts.attend.attend(parts.queries(x, active.positions), k, v, visible, active.positions, ())
    return parts.output(y, x)
