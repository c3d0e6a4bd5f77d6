"""Sinkhorn attention as a kernel: blocks of documents, sorting networks, sums of kernels."""

from typing import Any

import pytest
import torch

from layouts import LAYOUTS, apart, differentiated, documents_of, in_steps, place_of, real_of, tensors
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, KernelCall, SinkhornKernel, SoftmaxKernel, SumKernel
from manyformer.nn.clustered.sinkhorn_kernel import BilinearSorting, MLPSorting
from manyformer.nn.core import Context
from manyformer.nn.masks import Causal, Mask, Window
from manyformer.nn.positions import NoPosition

BOTH = pytest.mark.parametrize("mask", [None, Causal()], ids=["both sides", "causal"])
NETS = pytest.mark.parametrize("net", [MLPSorting, BilinearSorting])


def kernel(mask: Mask | None, net: type = MLPSorting, block: int = 4, **words: Any) -> SinkhornKernel:
    more = (8,) if net is MLPSorting else ()
    return SinkhornKernel(net(2, 6, *more, causal=mask is not None), block, mask, **words).double().eval()


@BOTH
@pytest.mark.parametrize("block", [23, 50])
def test_one_block_is_full_attention(mask: Mask | None, block: int) -> None:
    inputs, place = tensors(2, 2, 6, 6), place_of("plain")
    actual, expected = (
        each(KernelCall(*inputs, place, place, NoPosition())).y
        for each in (kernel(mask, block=block), SoftmaxKernel(mask, path="naive"))
    )
    grad_output = torch.randn_like(actual)
    assert apart(differentiated(actual, grad_output, inputs), differentiated(expected, grad_output, inputs)) < 1e-10


@BOTH
@NETS
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("cut", [None, 2])
def test_documents_are_sorted_by_themselves(mask: Mask | None, net: type, layout: str, cut: int | None) -> None:
    if mask is not None and cut is not None:
        return
    sort, (q, k, v), place = kernel(mask, net, sortcut_blocks=cut), tensors(2, 1, 6, 6), place_of(layout)
    y = sort(KernelCall(q, k, v, place, place, NoPosition())).y
    gradients = torch.autograd.grad((y * real_of(layout)).sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (y, *gradients))
    for row, columns in documents_of(layout):
        alone = positions_of(torch.zeros(1, len(columns), dtype=torch.long), None, None)[0]
        parts = (x[row : row + 1, :, columns] for x in (q, k, v))
        torch.testing.assert_close(y[row : row + 1, :, columns], sort(KernelCall(*parts, alone, alone, NoPosition())).y)


@NETS
@pytest.mark.parametrize("layout", ["plain", "left padding", "packed"])
def test_going_on_gives_what_one_pass_gives(net: type, layout: str) -> None:
    sizes = [9, *[1] * 5, 9]
    both = SumKernel(kernel(Causal(), net, iterations=2), SoftmaxKernel(Window(3)))
    attention = Attention(12, 2, both).double().eval()
    x = torch.randn(2, 23, 12, dtype=torch.float64)
    expected = attention(x, Context(place_of(layout))).y
    state, actual = attention.init_state(2, device=x.device, dtype=x.dtype), []
    for part, place in in_steps(layout, sizes):
        y, state, _ = attention(x[:, part], Context(place), state)
        actual.append(y)
    real = real_of(layout)[:, 0]
    torch.testing.assert_close(torch.cat(actual, 1) * real, expected * real)


def test_noise_is_for_training_and_follows_from_the_seed() -> None:
    sort, inputs, place = kernel(None), tensors(2, 2, 6, 6), place_of("plain")

    def run() -> torch.Tensor:
        torch.manual_seed(1)
        y: torch.Tensor = sort(KernelCall(*inputs, place, place, NoPosition())).y
        return y

    still = run()
    sort.train()
    assert torch.equal(run(), run())
    assert not torch.allclose(run(), still)
    sort.gumbel_noise = 0.0
    assert torch.equal(run(), still)


def test_gumbel_noise_draws_from_the_softmax() -> None:
    from manyformer.nn.clustered.sinkhorn_attention import gumbel

    logits = torch.tensor([0.0, 1.0, 2.0])
    drawn = (logits + gumbel(logits.expand(20_000, 3))).argmax(-1).bincount() / 20_000
    torch.testing.assert_close(drawn, logits.softmax(-1), atol=0.02, rtol=0)


def test_a_sum_of_kernels_is_their_sum() -> None:
    one, two, inputs, place = kernel(None), SoftmaxKernel(), tensors(2, 2, 6, 6), place_of("packed")
    outs = [each(KernelCall(*inputs, place, place, NoPosition())).y for each in (one, two, SumKernel(one, two))]
    torch.testing.assert_close(outs[0] + outs[1], outs[2])
    assert "; and " in SumKernel(one, two).explain(KernelCall(*inputs, place, place, NoPosition()))


def test_masks_sizes_and_states_that_sorting_cannot_keep_are_refused() -> None:
    for words, what in (
        ({"mask": Window(3)}, "must be Causal"),
        ({"mask": Causal(), "sortcut_blocks": 2}, "must not be Causal"),
        ({"mask": None, "temperature": 0.0}, "temperature"),
        ({"mask": None, "sortcut_blocks": 0}, "sortcut_blocks"),
    ):
        with pytest.raises(ValueError, match=what):
            kernel(**words)
    with pytest.raises(ValueError, match="needs a sorting network with causal=True"):
        SinkhornKernel(BilinearSorting(2, 6, causal=False), 4, Causal())
    with pytest.raises(ValueError, match="sorts whole sequences"):
        kernel(None).init_state(1, device=torch.device("cpu"), dtype=torch.float32)
    q, k, v = tensors(2, 2, 6, 6)
    place = place_of("plain")
    with pytest.raises(ValueError, match="built for max_blocks=8"):
        kernel(None, block=2)(KernelCall(q, k, v, place, place, NoPosition()))
    with pytest.raises(ValueError, match="cross-attention"):
        kernel(None)(KernelCall(q[:, :, :5], k, v, place.columns(0, 5), place, NoPosition()))
    with pytest.raises(ValueError, match="at least 2"):
        SumKernel(SoftmaxKernel())
