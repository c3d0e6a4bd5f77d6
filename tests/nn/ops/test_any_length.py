"""Recurrences of exported graphs by doubling: the loop over tokens, also through the layers that have one."""

from collections.abc import Iterator

import jaxtyping
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from manyformer.nn.core import contiguous_positions
from manyformer.nn.kernels.kernel import KernelCall
from manyformer.nn.linear.infini_kernel import InfiniKernel
from manyformer.nn.ops import any_length
from manyformer.nn.ops.any_length import scan_any_length
from manyformer.nn.ops.document_rows import decayed_running_max
from manyformer.nn.positions import NoPosition
from manyformer.nn.recurrent.selective_scan import selective_scan, selective_scan_reference


@pytest.fixture
def without_shape_checks() -> Iterator[None]:
    """The checks of shapes, which tests alone have, cannot be recorded."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def exported(module: nn.Module, inputs: tuple[Tensor, ...], axes: list[int | None]) -> nn.Module:
    """The graph of a module for any length, along the axis of each input that is one."""
    shapes = tuple({} if axis is None else {axis: Dim.DYNAMIC} for axis in axes)
    return torch.export.export(module, inputs, dynamic_shapes=shapes).module()


def then(earlier: tuple[Tensor, ...], later: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The affine function x -> a x + b of two parts, one after the other."""
    return later[0] @ earlier[0], later[1] + later[0] @ earlier[1]


@pytest.mark.parametrize("length", [1, 2, 3, 8, 21])
def test_doubling_is_the_product_of_matrices_one_after_another(length: int) -> None:
    torch.manual_seed(0)
    matrices = torch.randn(2, length, 3, 3, dtype=torch.float64)
    vectors = torch.randn(2, length, 3, 1, dtype=torch.float64)
    _, found = scan_any_length(then, (matrices, vectors), (0.0, 0.0), 1)
    state = torch.zeros(2, 3, 1, dtype=torch.float64)
    for i in range(length):
        state = matrices[:, i] @ state + vectors[:, i]
        torch.testing.assert_close(found[:, i], state)


def test_more_tokens_than_the_steps_reach_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(any_length, "EXPORTED_LENGTH", 4)
    steps = (torch.ones(5, 1, 1), torch.ones(5, 1, 1))
    with pytest.raises(ValueError, match="5 tokens is longer than an exported graph serves: 4"):
        scan_any_length(then, steps, (0.0, 0.0), 0)


@pytest.mark.usefixtures("without_shape_checks")
def test_an_exported_selective_scan_is_the_loop_with_gradients() -> None:
    class Scan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = nn.Parameter(-3 * torch.rand(3, 4, dtype=torch.float64))
            self.memory = nn.Parameter(torch.randn(2, 3, 4, dtype=torch.float64))

        def forward(self, x: Tensor, steps: Tensor, writes: Tensor, reads: Tensor, starts: Tensor) -> Tensor:
            y, memory = selective_scan(x, steps, self.rates, writes, reads, self.memory, starts)
            return torch.cat([y, memory.mT], 1)

    def draw(length: int) -> tuple[Tensor, ...]:
        x, steps = torch.randn(2, length, 3, dtype=torch.float64), torch.rand(2, length, 3, dtype=torch.float64)
        writes, reads = torch.randn(2, 2, length, 4, dtype=torch.float64)
        return x, steps, writes, reads, torch.rand(2, length) < 0.3

    torch.manual_seed(0)
    scan = Scan()
    graph = exported(scan, draw(6), [1] * 5)
    inputs = draw(19)
    x, steps, writes, reads, starts = inputs
    expected = selective_scan_reference(x, steps, scan.rates, writes, reads, scan.memory, starts)
    expected_grads = torch.autograd.grad(expected.y.square().sum(), [scan.rates, scan.memory])
    found = graph(*inputs)
    torch.testing.assert_close(found, torch.cat([expected.y, expected.memory.mT], 1))
    found_grads = torch.autograd.grad(found[:, :19].square().sum(), list(graph.parameters()))
    torch.testing.assert_close(found_grads, expected_grads)


@pytest.mark.usefixtures("without_shape_checks")
def test_an_exported_running_maximum_decays_as_the_loop_does() -> None:
    class Level(nn.Module):
        def forward(self, x: Tensor, decay: Tensor, initial: Tensor) -> Tensor:
            return decayed_running_max(x, decay, None, initial)

    torch.manual_seed(0)
    graph = exported(Level(), (torch.randn(1, 2, 5), -torch.rand(1, 2, 5), torch.zeros(1, 2)), [2, 2, None])
    x, decay, initial = 3 * torch.randn(1, 2, 23), -torch.rand(1, 2, 23), torch.tensor([[4.0, -1.0]])
    # a total decay, after which nothing earlier is compared
    decay[0, 1, 11] = -torch.inf
    level = initial
    found = graph(x, decay, initial)
    for i in range(23):
        level = torch.maximum(level + decay[..., i], x[..., i])
        torch.testing.assert_close(found[..., i], level)


@pytest.mark.usefixtures("without_shape_checks")
@pytest.mark.parametrize("update", [pytest.param("sum", marks=pytest.mark.slow), "delta"])
def test_an_exported_memory_of_segments_is_the_loop_over_segments(update: str) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.kernel = InfiniKernel(4, 4, update=update).double()  # type: ignore[arg-type]

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            positions = contiguous_positions(q.shape[0], 0, q.shape[2], q.device)
            return self.kernel(KernelCall(q, k, v, positions, positions, NoPosition())).y

    def draw(length: int) -> tuple[Tensor, ...]:
        return tuple(torch.randn(1, heads, length, 6, dtype=torch.float64) for heads in (4, 2, 2))

    torch.manual_seed(0)
    segments = Segments()
    graph = exported(segments, draw(6), [2, 2, 2])
    for length in (7, 8, 30):
        inputs = draw(length)
        torch.testing.assert_close(graph(*inputs), segments(*inputs))
