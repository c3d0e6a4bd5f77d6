"""Performer and Linformer against released packages, with their projections copied."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.analysis.contracts import Adapter
from manyformer.nn import Attention, KernelCall, LinearKernel, LinformerKernel
from manyformer.nn.core import Context, ContiguousLayout, TokenPositions
from manyformer.nn.linear import EluPlusOneFeatures, FavorPlusFeatures, GeneralizedFavorFeatures
from manyformer.nn.low_rank.linformer_kernel import LearnedLengthProjection
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition

pytestmark = [pytest.mark.oracle, pytest.mark.filterwarnings("ignore")]

WHY = "the released package {} is not installed (pip install 'manyformer[peers]')"
HEADS, KEY, LENGTH, FEATURES = 3, 16, 37, 40
NOWHERE = NoPosition()


def installed(name: str) -> Any:
    return pytest.importorskip(name, reason=WHY.format(name))


def place(length: int) -> TokenPositions:
    return TokenPositions(
        torch.arange(length).expand(2, -1), torch.zeros(2, length, dtype=torch.long), ContiguousLayout()
    )


def drawn(scale: float = 1.0) -> list[Tensor]:
    return [(scale * torch.randn(2, HEADS, LENGTH, KEY, dtype=torch.float64)).requires_grad_() for _ in range(3)]


def compare(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    grad_output = torch.randn_like(ours)
    left, right = ([y, *torch.autograd.grad((y * grad_output).sum(), leaves)] for y in (ours, theirs))
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


@pytest.mark.parametrize("causal", [False, True])
def test_positive_features(causal: bool) -> None:
    """Without their floors, which are added at other places: with them both are estimates of the same, not equal."""
    reference = installed("performer_pytorch.performer_pytorch")
    kernel = LinearKernel(FavorPlusFeatures(KEY, FEATURES, floor=0.0).double(), Causal() if causal else None, chunk=16)
    matrix = kernel.features.matrix[0]
    q, k, v = drawn()
    a, c = (reference.softmax_kernel(x, projection_matrix=matrix, is_query=x is q, eps=0.0) for x in (q, k))
    attend = reference.causal_linear_attention_noncuda if causal else reference.linear_attention
    expected = attend(a, c, v, **({"chunk_size": 5, "eps": 0.0} if causal else {}))
    compare(kernel(KernelCall(q, k, v, place(LENGTH), place(LENGTH), NOWHERE)).y, expected, [q, k, v])


@pytest.mark.parametrize("causal", [False, True])
def test_generalised_features(causal: bool) -> None:
    reference = installed("performer_pytorch.performer_pytorch")
    kernel = LinearKernel(GeneralizedFavorFeatures(KEY, FEATURES).double(), Causal() if causal else None, chunk=16)
    q, k, v = drawn()
    a, c = (reference.generalized_kernel(x, projection_matrix=kernel.features.matrix[0]) for x in (q, k))
    attend = reference.causal_linear_attention_noncuda if causal else reference.linear_attention
    expected = attend(a, c, v, **({"chunk_size": 5, "eps": 0.0} if causal else {}))
    compare(kernel(KernelCall(q, k, v, place(LENGTH), place(LENGTH), NOWHERE)).y, expected, [q, k, v])


def test_fast_attention_as_it_is_released() -> None:
    """The whole bidirectional module, its floor of 1e-4 included: as near as the floors allow, about a thousandth."""
    reference = installed("performer_pytorch").FastAttention(KEY, FEATURES)
    kernel = LinearKernel(FavorPlusFeatures(KEY, FEATURES))
    kernel.features.matrix[0] = reference.projection_matrix
    q, k, v = (x.detach().float() for x in drawn(0.5))
    torch.testing.assert_close(
        kernel(KernelCall(q, k, v, place(LENGTH), place(LENGTH), NOWHERE)).y, reference(q, k, v), atol=3e-2, rtol=0
    )


@pytest.mark.slow
def test_ours_leaks_nothing_where_the_released_one_leaks() -> None:
    package = installed("performer_pytorch")
    model = package.PerformerLM(
        num_tokens=60,
        max_seq_len=512,
        dim=32,
        depth=2,
        heads=2,
        dim_head=16,
        causal=True,
        nb_features=16,
        feature_redraw_interval=None,
    ).eval()
    reference = mf.check(Adapter(logits=model, vocab=60, max_length=512), only=["causal"])
    assert reference["causal"].verdict == "failed"
    assert reference["causal"].measured is not None
    assert reference["causal"].measured > 1e-6
    ours = mf.check("performer", only=["causal", "causal-gradient"])
    assert not ours.failed
    assert ours["causal"].measured == 0.0
    assert ours.length == reference.length == 512


@pytest.mark.parametrize("length", [24, 17])
def test_linformer(length: int) -> None:
    """One projection for all heads, keys and values each their own."""
    package = installed("linformer")
    reference = package.LinformerSelfAttention(24, 24, k=6, heads=3).double().eval()
    keys, values = (LearnedLengthProjection(24, 6).double() for _ in range(2))
    ours = Attention(24, 3, LinformerKernel(keys, values), bias=False).double()
    with torch.no_grad():
        keys.weight[0], values.weight[0] = reference.proj_k.T, reference.proj_v.T
        ours.q_proj.weight.copy_(reference.to_q.weight)
        ours.kv_proj.weight.copy_(torch.cat([reference.to_k.weight, reference.to_v.weight]))
        ours.out_proj.weight.copy_(reference.to_out.weight)
        reference.to_out.bias.zero_()
    x = torch.randn(2, length, 24, dtype=torch.float64, requires_grad=True)
    compare(ours(x, Context(place(length))).y, reference(x), [x])


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_in_closed_form(causal: bool) -> None:
    """Equations 4 to 12 of Katharopoulos et al. 2020, written with the whole S_i and z_i, and their gradients."""
    q, k, v = drawn()
    a, c = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    outer = c[..., :, None] * v[..., None, :]
    s, z = (outer.cumsum(2), c.cumsum(2)) if causal else (outer.sum(2, keepdim=True), c.sum(2, keepdim=True))
    expected = (a[..., None, :] @ s)[..., 0, :] / (a * z).sum(-1, keepdim=True)
    kernel = LinearKernel(EluPlusOneFeatures(), Causal() if causal else None, chunk=16)
    compare(kernel(KernelCall(q, k, v, place(LENGTH), place(LENGTH), NOWHERE)).y, expected, [q, k, v])
