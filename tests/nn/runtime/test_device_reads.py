"""Constants are copied to a device once, and are constants of a compiled graph too."""

import copy
import pickle

import pytest
import torch
from torch import Tensor

from manyformer.nn.runtime.device_reads import ConstantTensor, is_readable

CPU = torch.device("cpu")


def test_a_constant_is_one_tensor_on_each_device() -> None:
    constant = ConstantTensor(((1, 2), (3, 4)), torch.long)
    tensor = constant.on(CPU)
    assert tensor.tolist() == [[1, 2], [3, 4]]
    assert tensor.dtype == torch.long
    assert ConstantTensor(((1, 2), (3, 4)), torch.long).on(CPU) is tensor
    assert ConstantTensor(((1, 2), (3, 4)), torch.float64).on(CPU).dtype == torch.float64
    on_meta = constant.on(torch.device("meta"))
    assert on_meta.is_meta
    assert constant.on(torch.device("meta")) is on_meta


def test_a_constant_of_inference_serves_training() -> None:
    with torch.inference_mode():
        tensor = ConstantTensor((0.5, 0.25), torch.float32).on(CPU)
    weight = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad((weight * tensor).sum(), weight)
    assert gradient.tolist() == [0.5, 0.25]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda constant: pickle.loads(pickle.dumps(constant))])
def test_a_copy_has_the_same_values(duplicate) -> None:  # type: ignore[no-untyped-def]
    constant = ConstantTensor((7, 8), torch.long)
    assert duplicate(constant).on(CPU) is constant.on(CPU)


@pytest.mark.usefixtures("unchecked")
def test_a_graph_holds_several_constants() -> None:
    first, second = ConstantTensor((2, 3), torch.long), ConstantTensor((5, 7), torch.long)
    graphs = []

    def count(graph: torch.fx.GraphModule, examples: list[Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=count, fullgraph=True)
    def scale(x: Tensor) -> Tensor:
        assert not is_readable(x)
        return x * first.on(x.device) + second.on(x.device)

    for _ in range(3):
        assert scale(torch.tensor([1, 2])).tolist() == [7, 13]
    torch.compiler.reset()
    assert len(graphs) == 1
    assert is_readable(torch.ones(1))
    assert not is_readable(torch.ones(1, device="meta"))
