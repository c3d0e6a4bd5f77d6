"""A function that the compiler is disabled for breaks the graph, and is imported and run without the compiler."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from manyformer.nn.runtime.torch_internals import compiler_disabled


class Graphs:
    """A backend that counts graphs and the calls in them."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        self.calls.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward


def _halve(x: Tensor, times: int = 1) -> Tensor:
    """Halve x."""
    for _ in range(times):
        x = _divide(x)
    return x


def _divide(x: Tensor) -> Tensor:
    return x / 2


class Halved(nn.Module):
    def __init__(self, decorator: Callable[..., Callable[..., Tensor]]) -> None:
        super().__init__()
        self.function = decorator(_halve)

    def forward(self, x: Tensor) -> Tensor:
        return self.nested(x * 3) + 1

    def nested(self, x: Tensor) -> Tensor:
        return self.function(x + 1, times=2) * 2


def compiled_graphs(decorator: Callable[..., Callable[..., Tensor]]) -> tuple[list[int], dict[str, int]]:
    """The sizes of the graphs of two lengths, and the number of graph breaks by their reason."""
    torch.compiler.reset()
    counters.clear()
    graphs, module = Graphs(), Halved(decorator)
    compiled = torch.compile(module, backend=graphs)
    for length in (3, 5, 3):
        x = torch.randn(length)
        torch.testing.assert_close(compiled(x), module(x))
    torch.compiler.reset()
    reasons = {reason.split("\n")[0]: count for reason, count in counters["graph_break"].items()}
    return graphs.calls, reasons


def test_graphs_break_where_those_of_torch_do() -> None:
    graphs, breaks = compiled_graphs(compiler_disabled)
    expected_graphs, expected_breaks = compiled_graphs(torch.compiler.disable)
    assert graphs == expected_graphs
    assert len(graphs) > 1
    assert list(breaks.values()) == list(expected_breaks.values())


def test_a_graph_without_the_decorator_does_not_break() -> None:
    graphs, breaks = compiled_graphs(lambda function: function)
    assert len(set(graphs)) == 1
    assert not breaks


def test_a_whole_graph_cannot_hold_the_function() -> None:
    compiled = torch.compile(Halved(compiler_disabled), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.compiler\.disable"):
        compiled(torch.ones(3))


def test_the_function_keeps_its_name_and_arguments() -> None:
    halve = compiler_disabled(_halve)
    assert (halve.__name__, halve.__doc__) == ("_halve", "Halve x.")
    assert torch.equal(halve(torch.ones(2), times=2), torch.full((2,), 0.25))


BUILD_AND_RUN = """
import sys, torch
import manyformer as mf
from manyformer.analysis.own_models import build_tiny
with torch.no_grad():
    for name in {names}:
        build_tiny(name, {{}}, 0)(torch.zeros(1, 40, dtype=torch.long))
sys.exit("torch._dynamo" in sys.modules)
"""


def test_eager_models_do_not_import_the_compiler() -> None:
    names = ["longformer-lm", "reformer", "routing-transformer", "mixtral", "mamba", "universal-transformer-lm"]
    code = BUILD_AND_RUN.format(names=names)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
