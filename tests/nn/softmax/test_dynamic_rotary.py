"""Dynamic NTK scaling: every query by its own length, so that cached keys are never turned for another one."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.models.embedding import empty_tail, positions_of
from manyformer.nn import Attention, DynamicRotaryKernel, KernelCall, SoftmaxKernel
from manyformer.nn.core import Context, TokenPositions
from manyformer.nn.masks import Causal
from manyformer.nn.positions import DynamicNTKRotaryScaling, NTKRotaryScaling, RotaryPosition

ORIGINAL = 8


def attention(pairs: Any = "interleaved", rotated: int = 8, **options: Any) -> Attention:
    kernel = DynamicRotaryKernel(
        SoftmaxKernel(Causal()), 8, DynamicNTKRotaryScaling(4.0, ORIGINAL), pairs=pairs, rotated=rotated
    )
    return Attention(16, 2, kernel, **options).double()


def context(length: int, segments: Tensor | None = None, rows: int = 2) -> Context:
    return Context(positions_of(torch.zeros(rows, length, dtype=torch.long), segments, None)[0])


@pytest.mark.parametrize(("pairs", "rotated"), [("interleaved", 8), ("halves", 8), ("interleaved", 4), ("halves", 4)])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_each_query_is_that_of_static_scaling_at_its_length(pairs: Any, rotated: int, kv_heads: int) -> None:
    """The definition: the last of n tokens sees what it would if the whole model were scaled for n tokens."""
    layer = attention(pairs, rotated, kv_heads=kv_heads)
    x = torch.randn(2, 21, 16, dtype=torch.float64)
    actual = layer(x, context(21)).y
    for last in (1, 7, 8, 9, 13, 21):
        factor = max(1.0, 4.0 * last / ORIGINAL - 3.0)
        position = RotaryPosition(8, rotated=rotated, pairs=pairs, scaling=NTKRotaryScaling(factor))
        static = Attention(16, 2, SoftmaxKernel(Causal()), kv_heads=kv_heads, position=position).double()
        static.load_state_dict(layer.state_dict())
        torch.testing.assert_close(actual[:, last - 1], static(x[:, :last], context(last)).y[:, -1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", [[1] * 37, [5, 1, 1, 20, 10], [30, 1, 6]])
def test_step_by_step_is_as_in_one_pass(sizes: list[int]) -> None:
    layer = attention()
    x = torch.randn(2, 37, 16, dtype=torch.float64)
    state = layer.init_state(2, device=x.device, dtype=x.dtype)
    outs = []
    tail = empty_tail(2, x.device)
    for part in x.split(sizes, dim=1):
        place, tail = positions_of(torch.zeros(part.shape[:2], dtype=torch.long), None, tail)
        y, state, _ = layer(part, Context(place), state)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), layer(x, context(37)).y, atol=1e-12, rtol=0)


def test_padding_and_other_rows_change_nothing() -> None:
    layer = attention()
    x = torch.randn(1, 19, 16, dtype=torch.float64)
    alone = layer(x, context(19, rows=1)).y
    wide = torch.randn(2, 30, 16, dtype=torch.float64)
    wide[0, 11:] = x[0]
    segments = torch.zeros(2, 30, dtype=torch.long)
    segments[0, :11] = -1
    torch.testing.assert_close(layer(wide, context(30, segments)).y[:1, 11:], alone, atol=1e-12, rtol=0)


def test_gradients_are_those_of_differences() -> None:
    layer = attention()
    x = torch.randn(1, 11, 16, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, context(11, rows=1)).y[:, 6:], x)


def test_a_second_rotation_odd_widths_and_recurrent_kernels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"DynamicRotaryKernel does not support .*query.*, which RotaryPosition needs"):
        attention(position=RotaryPosition(8))
    with pytest.raises(ValueError, match="must be even"):
        DynamicRotaryKernel(SoftmaxKernel(), 7, DynamicNTKRotaryScaling(4.0, 8))

    class Folding(SoftmaxKernel.__bases__[0]):  # type: ignore[misc, name-defined]
        recurrent = True

        def forward(self, *inputs: Any) -> Any: ...
        def explain(self, *inputs: Any) -> str:
            return ""

    with pytest.raises(ValueError, match="but Folding is recurrent"):
        DynamicRotaryKernel(Folding(), 8, DynamicNTKRotaryScaling(4.0, 8))


def test_it_says_what_it_costs() -> None:
    kernel = attention().kernel
    q = k = v = torch.zeros(2, 2, 20, 8)
    place: TokenPositions = context(20).positions
    assert kernel.explain(KernelCall(q, k, v, place, place, Attention(16, 2, SoftmaxKernel()).position)).endswith(
        "the keys are rotated for each of 12 queries beyond 8"
    )
