"""How much a model depends on each head: gradients of its gate, its removal, and integrated gradients."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.models import Model
from manyformer.models.model import CarriedState, eval_mode, model_name
from manyformer.nn.attention.head_gates import attention_heads, gated_heads
from manyformer.nn.batches import Batch, to_device

HeadValues = dict[str, Float[Tensor, " h"]]
"""A number for each head of each layer with heads, by the names of `attention_heads`."""

QUADRATURE_POINTS = 4
"""Points of an interval at which integrated gradients are computed."""

COMPLETENESS_TOLERANCE = 1e-3
"""The difference between the sum of integrated gradients and the change of the output, unless another is given."""

MAX_INTERVALS = 128


def head_importance(model: Model, batches: Iterable[Batch], *, rows_continue: bool = False) -> HeadValues:
    """The mean over rows of |d loss / d gate| of each head, at gates of 1 (Michel et al. 2019, section 4.1).

    The loss of a row is the sum over its targets, in nats, without label smoothing and dropout. Absolute values are
    taken for each row: those of a mean over rows would cancel. `rows_continue` states that row r of each batch
    continues row r of the previous one. Gradients of the model are cleared. Raises UserError for a model without
    heads."""
    layers = _layers(model)
    totals = {name: torch.zeros(heads, dtype=torch.float64) for name, heads in layers.items()}
    rows = 0
    carried = CarriedState(model, rows_continue=rows_continue)
    with eval_mode(model), torch.enable_grad():
        for batch in batches:
            batch = to_device(batch, model.device)
            row_count = len(batch[0])
            # a gate for each row, whose gradients stay apart until their absolute values are added
            gates = {name: nn.Parameter(torch.ones(row_count, heads)) for name, heads in layers.items()}
            with gated_heads(model, gates):
                # the sum over targets, not the mean: long rows count as much as their tokens
                loss = model.loss(batch, state=carried.state_for(batch))
                torch.autograd.backward(loss.total)
            carried.update(loss)
            rows += row_count
            for name, gate in gates.items():
                if gate.grad is not None:
                    totals[name] += gate.grad.cpu().double().abs().sum(0)
            model.zero_grad(set_to_none=True)
    return {name: total / max(rows, 1) for name, total in totals.items()}


def normalize_layers(values: Mapping[str, Float[Tensor, " h"]]) -> HeadValues:
    """Values divided by the Euclidean norm of their layer (Michel et al. 2019, section 4.1); zeros stay zeros."""
    return {name: layer / layer.norm().clamp(min=torch.finfo(layer.dtype).tiny) for name, layer in values.items()}


def ablate_heads(model: Model, score: Callable[[], float], *, on_head: Callable[[], None] = lambda: None) -> HeadValues:
    """The change of `score` when each head alone is switched off (Michel et al. 2019, section 3.2).

    `score` computes a score of the model under the current gates; `on_head` is called after each head. Raises UserError
    for a model without heads."""
    layers = _layers(model)
    # once for all heads: the score may take minutes
    reference = score()
    changes: HeadValues = {}
    for name, heads in layers.items():
        changes[name] = torch.zeros(heads, dtype=torch.float64)
        for head in range(heads):
            gates = torch.ones(heads)
            gates[head] = 0
            with gated_heads(model, {name: gates}):
                changes[name][head] = score() - reference
            on_head()
    return changes


class _Interval(NamedTuple):
    """Integrated gradients between two values of all gates, and their difference from the change of the output."""

    error: float
    begin: float
    end: float
    totals: HeadValues


def integrated_gate_gradients(
    model: Model, output: Callable[[], Tensor], *, tolerance: float = COMPLETENESS_TOLERANCE
) -> HeadValues:
    """The integral of d output / d gate of each head along the line from all gates 0 to all gates 1.

    Sundararajan et al. (2017, section 3). By Gauss-Legendre quadrature, which halves the interval with the largest
    error until the sum over heads equals the change of the output up to `tolerance`, or `MAX_INTERVALS` are reached:
    activations have kinks. `output` computes a scalar under the current gates; gradients of the model are cleared.
    Raises UserError for a model without heads."""
    layers = _layers(model)

    def gates_at(share: float) -> dict[str, nn.Parameter]:
        return {name: nn.Parameter(torch.full((heads,), share)) for name, heads in layers.items()}

    def output_at(share: float) -> float:
        with gated_heads(model, gates_at(share)), torch.no_grad():
            return float(output())

    def integrate(begin: float, end: float) -> _Interval:
        totals = {name: torch.zeros(heads, dtype=torch.float64) for name, heads in layers.items()}
        for node, quadrature_weight in zip(*np.polynomial.legendre.leggauss(QUADRATURE_POINTS)):
            gates = gates_at((begin + end) / 2 + node * (end - begin) / 2)
            with gated_heads(model, gates):
                torch.autograd.backward(output())
            for name, gate in gates.items():
                if gate.grad is not None:
                    totals[name] += quadrature_weight * (end - begin) / 2 * gate.grad.cpu().double()
            model.zero_grad(set_to_none=True)
        # completeness: the integrals of all heads add up to the change of the output between the ends
        total = sum(float(part.sum()) for part in totals.values())
        return _Interval(abs(total - (output_at(end) - output_at(begin))), begin, end, totals)

    with eval_mode(model), torch.enable_grad():
        intervals = [integrate(0.0, 1.0)]
        while sum(interval.error for interval in intervals) > tolerance and len(intervals) < MAX_INTERVALS:
            worst = max(intervals, key=lambda interval: interval.error)
            middle = (worst.begin + worst.end) / 2
            intervals = [interval for interval in intervals if interval is not worst]
            intervals += [integrate(worst.begin, middle), integrate(middle, worst.end)]
    return {name: sum((part.totals[name] for part in intervals), torch.zeros(heads)) for name, heads in layers.items()}


def _layers(model: Model) -> dict[str, int]:
    """The number of heads of each layer with heads. Raises UserError if there is none."""
    layers = {name: layer.heads for name, layer in attention_heads(model).items()}
    if not layers:
        raise UserError(f"{model_name(model)} has no attention heads")
    return layers
