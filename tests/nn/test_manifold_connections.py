"""Bounded connections against the classes of transformers, and the gain of many of them in a row."""

from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from stream_rules import branch_outputs, run_rule, shaken
from torch import Tensor, nn

from manyformer.nn.streams import (
    HyperConnections,
    ManifoldConnection,
    ManifoldHead,
    StaticConnection,
    UnmixedConnection,
    sinkhorn,
)

DIM = 8
STREAMS = 4
DEPTH = 48
NORM_EPS = 1e-6


def modelling(model_type: str) -> ModuleType:
    name = f"transformers.models.{model_type}.modeling_{model_type}"
    return pytest.importorskip(name, reason=f"this transformers has no {model_type}")  # type: ignore[no-any-return]


def with_weights_of(theirs: nn.Module, ours: nn.Module, prefix: str = "") -> None:
    """Give both the same random weights, as large as those of a trained model may be."""
    with torch.no_grad():
        for name, weight in ours.named_parameters():
            weight.copy_(torch.randn_like(weight))
            theirs.get_parameter(prefix + name).copy_(weight)


def test_mixed_streams_are_those_of_the_class_of_deepseek_v4() -> None:
    module = modelling("deepseek_v4")
    config = module.DeepseekV4Config(hidden_size=DIM, hc_mult=STREAMS, rms_norm_eps=NORM_EPS)
    h = torch.randn(2, 7, STREAMS, DIM)
    theirs = module.DeepseekV4HyperConnection(config)
    ours = ManifoldConnection(DIM, STREAMS, 1)
    with_weights_of(theirs, ours)
    with torch.no_grad():
        weights = ours(h)
        post, comb, collapsed = theirs(h)
    torch.testing.assert_close(weights.write, post, rtol=0, atol=1e-6)
    torch.testing.assert_close(weights.mix, comb, rtol=0, atol=1e-6)
    torch.testing.assert_close((weights.read[..., None] * h).sum(-2), collapsed, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("model_type", "name"), [("deepseek_v4", "DeepseekV4"), ("hy_v4", "HYV4")])
def test_the_last_stream_is_that_of_the_classes(model_type: str, name: str) -> None:
    module = modelling(model_type)
    theirs = getattr(module, f"{name}HyperHead")(
        getattr(module, f"{name}Config")(hidden_size=DIM, hc_mult=STREAMS, rms_norm_eps=NORM_EPS)
    )
    ours = ManifoldHead(DIM, STREAMS)
    with_weights_of(theirs, ours, "hc_")
    h = torch.randn(2, 7, STREAMS, DIM)
    with torch.no_grad():
        torch.testing.assert_close(ours(h), theirs(h), rtol=0, atol=1e-6)


def test_unmixed_streams_are_those_of_the_class_of_hunyuan() -> None:
    module = modelling("hy_v4")
    theirs = module.HYV4HyperConnection(module.HYV4Config(hidden_size=DIM, hc_mult=STREAMS, rms_norm_eps=NORM_EPS))
    ours = UnmixedConnection(DIM, STREAMS, 1)
    with_weights_of(theirs, ours)
    h = torch.randn(2, 7, STREAMS, DIM)
    with torch.no_grad():
        weights = ours(h)
        post, collapsed = theirs(h)
    assert weights.mix is None
    torch.testing.assert_close(weights.write, post, rtol=0, atol=1e-6)
    torch.testing.assert_close((weights.read[..., None] * h).sum(-2), collapsed, rtol=0, atol=1e-6)


def by_definition(rule: HyperConnections, x: Tensor, branches: tuple[int, ...]) -> Tensor:
    """Xie et al. 2025: x = pre H, H' = C^T H + post y, stream by stream."""
    streams = [x] * STREAMS
    connections: list[Any] = [connection for layer in rule.layers for connection in layer]  # type: ignore[attr-defined]
    for number, connection in enumerate(connections):
        read, mix, write = connection(torch.stack(streams, 2))
        y = branch_outputs(number, sum(read[..., j, None] * streams[j] for j in range(STREAMS)))  # type: ignore[arg-type]
        if mix is not None:
            streams = [sum(mix[..., j, k, None] * streams[j] for j in range(STREAMS)) for k in range(STREAMS)]  # type: ignore[misc]
        streams = [streams[k] + write[..., k, None] * y for k in range(STREAMS)]
    assert rule.head is not None
    return rule.head(torch.stack(streams, 2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [ManifoldConnection, UnmixedConnection])
def test_outputs_and_gradients_are_those_of_the_equations(kind: Any) -> None:
    branches = (2, 1)
    rule = shaken(HyperConnections(STREAMS, branches, partial(kind, DIM, STREAMS), ManifoldHead(DIM, STREAMS)))
    x = torch.randn(2, 5, DIM, dtype=torch.double, requires_grad=True)
    results = []
    for y in (run_rule(rule, x, branches), by_definition(rule, x, branches)):
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *rule.parameters()])])
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_columns_sum_to_one_and_rows_for_moderate_logits_alone(scale: float) -> None:
    torch.manual_seed(0)
    mix = sinkhorn(torch.randn(200, STREAMS, STREAMS, dtype=torch.double) * scale)
    assert (mix.sum(-2) - 1).abs().max() < 2e-6
    row_error = (mix.sum(-1) - 1).abs().max()
    # what is called doubly stochastic is so as far as 20 steps go
    assert 0.01 < row_error < 0.1 if scale == 30.0 else row_error < 1e-3


@pytest.mark.parametrize("kind", [ManifoldConnection, UnmixedConnection])
def test_streams_that_begin_equal_part(kind: Any) -> None:
    """Where all branches read the mean of equal streams, all get the same gradients and stay equal for ever."""
    differences = []
    for reads_mean in (False, True):
        rule = HyperConnections(STREAMS, (2, 2), partial(kind, DIM, STREAMS), ManifoldHead(DIM, STREAMS)).double()
        if reads_mean:
            for connection in rule.modules():
                if isinstance(connection, kind):
                    nn.init.constant_(connection.base[:STREAMS], -1.1)
        x = torch.randn(2, 5, DIM, dtype=torch.double)
        run_rule(rule, x, (2, 2)).sin().sum().backward()
        gradient = rule.layers[0][0].base.grad[STREAMS : 2 * STREAMS]  # type: ignore[index,union-attr]
        differences.append((gradient - gradient.mean()).abs().max() / gradient.abs().max())
    assert differences[0] > 1e-3
    assert differences[1] < 1e-9


def composed_gain(connections: list[Any], h: Tensor) -> float:
    """The largest sum of absolute weights of any stream in the product of all mixings, forwards or backwards."""
    product = torch.eye(STREAMS)
    for connection in connections:
        product = connection(h).mix.reshape(-1, STREAMS, STREAMS)[0].T @ product
    return max(product.abs().sum(0).max().item(), product.abs().sum(1).max().item())


def test_bounded_mixing_does_not_grow_over_48_layers_and_free_mixing_does() -> None:
    """All parameters have noise of 0.1, which moves a mixing less through its logits than directly; none is trained."""
    torch.manual_seed(0)
    h = torch.randn(1, 1, STREAMS, DIM)
    bounded = [ManifoldConnection(DIM, STREAMS, number) for number in range(2 * DEPTH)]
    free = [StaticConnection(STREAMS, number) for number in range(2 * DEPTH)]
    for part in (*bounded, *free):
        for weight in part.parameters():
            with torch.no_grad():
                weight += 0.1 * torch.randn_like(weight)
    with torch.no_grad():
        assert composed_gain(bounded, h) < 1.6
        assert composed_gain(free, h) > 10
