"""Hyper-connections against their equations, one stream at a time."""

from functools import partial
from typing import Any

import pytest
import torch
from stream_rules import branch_outputs, run_rule, shaken
from torch import Tensor

from manyformer.nn.streams import BranchPlace, DynamicConnection, HyperConnections, StaticConnection

DIM = 5
STREAMS = 3
BRANCHES = (2, 3, 1)


def by_definition(rule: HyperConnections, x: Tensor) -> Tensor:
    """Zhu et al. 2024, equations 1 to 5 and 10 to 13: x_j and h_k by sums over streams."""
    streams = [x] * STREAMS
    connections: list[Any] = [connection for layer in rule.layers for connection in layer]  # type: ignore[attr-defined]
    for number, connection in enumerate(connections):
        static = getattr(connection, "static", connection)
        read = [static.read[j].expand(x.shape[:2]) for j in range(STREAMS)]
        mix = [[static.mix[j, k].expand(x.shape[:2]) for k in range(STREAMS)] for j in range(STREAMS)]
        write = [static.write[k].expand(x.shape[:2]) for k in range(STREAMS)]
        if isinstance(connection, DynamicConnection):
            for j, h in enumerate(streams):
                normed = h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()
                shares = (normed @ connection.projection.T).tanh()
                read[j] = read[j] + connection.scale[0] * shares[..., 0]
                mix[j] = [mix[j][k] + connection.scale[0] * shares[..., 1 + k] for k in range(STREAMS)]
                write[j] = write[j] + connection.scale[1] * shares[..., 1 + STREAMS]
        y = branch_outputs(number, sum(read[j][..., None] * streams[j] for j in range(STREAMS)))  # type: ignore[arg-type]
        streams = [
            sum(mix[j][k][..., None] * streams[j] for j in range(STREAMS)) + write[k][..., None] * y  # type: ignore[misc]
            for k in range(STREAMS)
        ]
    return sum(streams) / STREAMS  # type: ignore[return-value]


@pytest.mark.parametrize("make", [partial(StaticConnection, STREAMS), partial(DynamicConnection, DIM, STREAMS)])
def test_outputs_and_gradients_are_those_of_the_equations(make: Any) -> None:
    rule = shaken(HyperConnections(STREAMS, BRANCHES, make))
    x = torch.randn(2, 7, DIM, dtype=torch.double, requires_grad=True)
    results = []
    for y in (run_rule(rule, x, BRANCHES), by_definition(rule, x)):
        gradients = torch.autograd.grad(y.sin().sum(), [x, *rule.parameters()])
        results.append([y, *gradients])
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)


def test_streams_stay_in_the_dtype_of_the_input_and_weights_are_computed_in_float32() -> None:
    rule = HyperConnections(STREAMS, BRANCHES, partial(DynamicConnection, DIM, STREAMS)).bfloat16()
    seen = []
    rule.layers[0][0].register_forward_hook(lambda module, inputs, weights: seen.append(weights.mix.dtype))  # type: ignore[index]
    x, streams = rule.read(rule.start(torch.randn(1, 2, DIM).bfloat16()), BranchPlace(0, 0, 2))
    assert (x.dtype, streams.h.dtype, seen) == (torch.bfloat16, torch.bfloat16, [torch.float32])


def test_weights_of_tokens_change_none_of_static_ones_at_first() -> None:
    h = torch.randn(1, 4, STREAMS, DIM)
    static = StaticConnection(STREAMS, 4)
    dynamic = DynamicConnection(DIM, STREAMS, 4)
    assert static(h).read.tolist() == [0.0, 1.0, 0.0]
    for of_token, of_all in zip(dynamic(h), static(h)):
        torch.testing.assert_close(of_token, of_all.expand_as(of_token), rtol=0, atol=0)
