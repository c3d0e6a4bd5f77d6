"""Rotary positions: equal to the matrices of the paper, relative, convertible, and refused where they cannot be."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.core import Context, TokenPositions
from manyformer.nn.masks import Causal
from manyformer.nn.positions import (
    DynamicNTKRotaryScaling,
    LinearRotaryScaling,
    NTKRotaryScaling,
    RotaryPosition,
    YaRNRotaryScaling,
    convert_pairs,
    rotary,
)
from manyformer.nn.positions.rotary import rotary_frequencies
from token_rows import range_positions

PAIRS = ("interleaved", "halves")


def by_matrices(x: Tensor, pos: Tensor, rates: Tensor, pairs: str, gain: float = 1.0) -> Tensor:
    """The definition: one rotation matrix a position (equation 15 of the paper), written out pair by pair."""
    width, count = x.shape[-1], len(rates)
    out = torch.empty_like(x)
    for i, p in enumerate(pos.tolist()):
        matrix = torch.eye(width, dtype=x.dtype)
        for k, rate in enumerate(rates.tolist()):
            a, b = (2 * k, 2 * k + 1) if pairs == "interleaved" else (k, k + count)
            angle = torch.tensor(p * rate, dtype=torch.float64)
            matrix[a, a] = matrix[b, b] = gain * angle.cos()
            matrix[a, b], matrix[b, a] = -gain * angle.sin(), gain * angle.sin()
        out[..., i, :] = x[..., i, :] @ matrix.T
    return out


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("pairs", PAIRS)
def test_it_is_the_matrix_of_the_paper(pairs: Any, rotated: int, dtype: torch.dtype, atol: float) -> None:
    rotary = RotaryPosition(8, rotated=rotated, pairs=pairs)
    x = torch.randn(2, 3, 7, 8, dtype=dtype, requires_grad=True)
    grad_output = torch.randn_like(x)
    expected = by_matrices(x, torch.arange(4, 11), rotary_frequencies(rotated, 10_000.0), pairs)
    (wanted,) = torch.autograd.grad(expected, x, grad_output)
    for plain in (True, False):
        actual = rotary.query(x, range_positions(7, 4, plain=plain))
        (grad,) = torch.autograd.grad(actual, x, grad_output)
        torch.testing.assert_close(actual, expected, atol=atol, rtol=0)
        torch.testing.assert_close(grad, wanted, atol=atol, rtol=0)


@pytest.mark.parametrize("pairs", PAIRS)
def test_scores_know_the_distance_alone(pairs: Any) -> None:
    rotary = RotaryPosition(16, pairs=pairs, base=100.0)
    q, k = torch.randn(2, 1, 2, 9, 16, dtype=torch.float64).unbind()
    here, there = (rotary.query(q, range_positions(9, s)) @ rotary.key(k, range_positions(9, s)).mT for s in (0, 1000))
    torch.testing.assert_close(here, there, atol=1e-10, rtol=0)
    torch.testing.assert_close(here.diagonal(dim1=-2, dim2=-1), (q * k).sum(-1), atol=1e-12, rtol=0)


def test_far_positions_do_not_collide_in_half_precision() -> None:
    x = torch.ones(1, 1, 2, 64, dtype=torch.bfloat16)
    turned = RotaryPosition(64).query(x, range_positions(2, 70_001))
    assert turned.dtype == torch.bfloat16
    exact = RotaryPosition(64).query(x.double(), range_positions(2, 70_001))
    torch.testing.assert_close(turned.double(), exact, atol=0.01, rtol=0)
    assert not torch.equal(turned[:, :, 0], turned[:, :, 1])


def test_a_table_made_while_predicting_serves_training() -> None:
    rotary, x = RotaryPosition(8), torch.randn(1, 1, 4, 8, requires_grad=True)
    with torch.inference_mode():
        rotary.query(x.detach().clone(), range_positions(4))
    weight = torch.randn(1, 1, 4, 8)
    (gradient,) = torch.autograd.grad((rotary.query(x, range_positions(4)) * weight).sum(), x)
    (expected,) = torch.autograd.grad((RotaryPosition(8).query(x, range_positions(4)) * weight).sum(), x)
    assert torch.equal(gradient, expected)


def test_converting_the_model_leaves_the_table_alone() -> None:
    rotary, x = RotaryPosition(8), torch.randn(1, 1, 40, 8)
    before = rotary.query(x, range_positions(40))
    rotary.to(torch.bfloat16).to(torch.float64)
    assert torch.equal(rotary.query(x, range_positions(40)), before)
    assert not list(rotary.state_dict())


def test_odd_memory_is_turned_all_the_same() -> None:
    """Complex numbers want even strides; values of odd width give keys others."""
    rotary, packed = RotaryPosition(4), torch.randn(2, 5, 7, dtype=torch.float64)
    keys = packed[..., :4].unflatten(-1, (1, 4)).transpose(1, 2)
    expected = rotary.key(keys.contiguous(), range_positions(5))
    torch.testing.assert_close(rotary.key(keys, range_positions(5)), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("pairs", PAIRS)
@pytest.mark.parametrize("rotated", [8, 4])
def test_compiled_is_eager(pairs: Any, rotated: int, unchecked: None) -> None:
    rotary, x = RotaryPosition(8, rotated=rotated, pairs=pairs), torch.randn(2, 3, 5, 8)
    eager = rotary.query(x, range_positions(5))
    compiled = torch.compile(rotary.query, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, range_positions(5)), eager, atol=1e-6, rtol=0)
    torch.compiler.reset()


@pytest.mark.parametrize("rotated", [8, 4])
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_weights_are_converted_between_conventions(kv_heads: int, rotated: int) -> None:
    """Another convention and reordered rows of queries and keys: the same model."""
    one, other = (
        Attention(
            16, 2, SoftmaxKernel(Causal()), kv_heads=kv_heads, position=RotaryPosition(8, pairs=p, rotated=rotated)
        )  # type: ignore[arg-type]
        for p in PAIRS
    )
    for bias in (one.q_proj.bias, one.kv_proj.bias):
        torch.nn.init.normal_(bias)
    other.load_state_dict(one.state_dict())
    split = kv_heads * 8
    with torch.no_grad():
        for ours, reference in ((one.q_proj.weight, other.q_proj.weight), (one.q_proj.bias, other.q_proj.bias)):
            reference.copy_(convert_pairs(ours, 2, to="halves", rotated=rotated))
            back = convert_pairs(reference, 2, to="interleaved", rotated=rotated)
            assert torch.equal(back, ours)
        for ours, reference in ((one.kv_proj.weight, other.kv_proj.weight), (one.kv_proj.bias, other.kv_proj.bias)):
            reference[:split].copy_(convert_pairs(ours[:split], kv_heads, to="halves", rotated=rotated))
    x, ctx = torch.randn(2, 11, 16), Context(positions_of(torch.zeros(2, 11, dtype=torch.long), None, None)[0])
    torch.testing.assert_close(one(x, ctx).y, other(x, ctx).y, atol=1e-5, rtol=0)
    other.load_state_dict(one.state_dict())
    assert (one(x, ctx).y - other(x, ctx).y).abs().max() > 1e-3


def test_scalings_are_what_their_formulas_say() -> None:
    plain = rotary_frequencies(64, 10_000.0)
    assert torch.equal(LinearRotaryScaling(4.0).frequencies(64, 10_000.0), plain / 4)
    ntk = NTKRotaryScaling(4.0).frequencies(64, 10_000.0)
    assert ntk[0] == plain[0] == 1
    torch.testing.assert_close(ntk[-1], plain[-1] / 4)
    dynamic = DynamicNTKRotaryScaling(4.0, 100)
    short, long = dynamic.frequencies(64, 10_000.0, torch.tensor([[60], [100]])), torch.tensor(250)
    torch.testing.assert_close(short, plain.expand(2, 1, -1))
    torch.testing.assert_close(
        dynamic.frequencies(64, 10_000.0, long), NTKRotaryScaling(4 * 2.5 - 3).frequencies(64, 10_000.0)
    )


def test_yarn_leaves_fast_pairs_and_slows_slow_ones() -> None:
    plain = rotary_frequencies(64, 10_000.0)
    turns = 2048 * plain / (2 * torch.pi)
    by_pairs, by_turns = (YaRNRotaryScaling(4.0, 2048, ramp=r).frequencies(64, 10_000.0) for r in ("pairs", "turns"))  # type: ignore[arg-type]
    for actual in (by_pairs, by_turns):
        torch.testing.assert_close(actual[turns > 40], plain[turns > 40])
        torch.testing.assert_close(actual[turns < 0.8], plain[turns < 0.8] / 4)
    # the code and the paper are not the same thing
    assert 0.43 < ((by_pairs - by_turns) / by_pairs).abs().max() < 0.45
    middle = int(((turns - 10).abs()).argmin())
    slowed = 1 - (turns[middle] - 1) / 31
    torch.testing.assert_close(by_turns[middle], plain[middle] * (1 - slowed) + plain[middle] / 4 * slowed)


def test_yarn_multiplies_turned_channels_once() -> None:
    scaling = YaRNRotaryScaling(4.0, 32)
    x = torch.randn(1, 1, 3, 8, dtype=torch.float64)
    for pairs in PAIRS:
        actual = RotaryPosition(8, rotated=4, pairs=pairs, scaling=scaling).key(x, range_positions(3, 5))  # type: ignore[arg-type]
        expected = by_matrices(x, torch.arange(5, 8), scaling.frequencies(4, 10_000.0), pairs, scaling.attention_factor)
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)
        assert torch.equal(actual[..., 4:], x[..., 4:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RotaryPosition(7), r"the width of a head \(7\) and rotated \(7\) must be even"),
        (lambda: RotaryPosition(8, rotated=10), r"rotated \(10\) must be from 2 to the width of a head \(8\)"),
        (lambda: RotaryPosition(8, pairs="split"), r"pairs \('split'\) must be interleaved .* or halves"),  # type: ignore[arg-type]
        (lambda: RotaryPosition(8, scaling=DynamicNTKRotaryScaling(4.0, 64)), "use DynamicRotaryKernel instead"),  # type: ignore[arg-type]
        (lambda: LinearRotaryScaling(0.5), r"LinearRotaryScaling: factor \(0.5\) must be at least 1"),
        (lambda: YaRNRotaryScaling(4.0, 0), r"YaRNRotaryScaling: original_length \(0\) must be at least 1"),
        (
            lambda: YaRNRotaryScaling(4.0, 64, beta_fast=1.0),
            r"YaRNRotaryScaling: beta_fast \(1.0\) must be greater than beta_slow \(1.0\)",
        ),
        (lambda: YaRNRotaryScaling(4.0, 64, ramp="code"), r"YaRNRotaryScaling: ramp \('code'\) must be pairs"),  # type: ignore[arg-type]
        (lambda: convert_pairs(torch.zeros(9, 3), 2, to="halves"), "9 rows are not 2 heads"),
        (
            lambda: RotaryPosition(8).query(torch.zeros(1, 1, 2, 6), range_positions(2)),
            "width 8, these have 6 channels",
        ),
    ],
)
def test_scalings_and_widths_that_cannot_turn_are_refused(make: Any, message: str, unchecked: None) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_frequencies_are_copied_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the table, as for rows of unlike lengths on a GPU, whose positions the host does not read."""
    position = RotaryPosition(8, rotated=4, base=500.0)
    place = TokenPositions(torch.tensor([[3], [70_000]]), torch.zeros(2, 1, dtype=torch.long))
    monkeypatch.setattr(rotary, "MAX_TABLE_ROWS", 10)
    x = torch.randn(2, 1, 1, 8, dtype=torch.float64)
    with torch.inference_mode():
        first = position.query(x, place)
    tables: list[Any] = []
    monkeypatch.setattr(torch, "tensor", lambda *args, **options: tables.append(args))
    assert torch.equal(position.query(x, place), first)
    assert not tables
    # no part of the weights, and not rounded with them
    assert not position.state_dict()
    assert torch.equal(position.bfloat16().query(x, place), first)
    # usable for gradients, although made in inference mode
    x.requires_grad_()
    position.query(x, place).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.isfinite().all()


NAMES = ("rope", "rope-linear", "rope-ntk", "rope-dynamic", "rope-yarn")
SCALED = ("rope-dynamic", "rope-yarn")
"""Those whose tables depend on the length in the least simple ways are tried every time."""

CONTRACTS = {
    *("causal", "cached", "prefill", "preallocated", "rewind", "beams", "padding-left", "padding-state"),
    *("packing", "packing-state", "gradients", "float64", "bfloat16", "saving"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SCALED else pytest.mark.slow) for name in NAMES]
)
def test_promises(name: str) -> None:
    report = mf.check("compose", keywords={"position": name, "max_length": 16, "depth": 1}, only=CONTRACTS, length=40)
    assert not [row.sentence for row in report.rows if row.verdict != "passed"]


def test_layers_share_one_table() -> None:
    model = mf.build("compose", vocab=11, dim=16, depth=3, heads=2, position="rope")
    model(torch.randint(0, 11, (1, 4)))
    tables = [module._cache.table for module in model.modules() if isinstance(module, RotaryPosition)]
    assert len(tables) == 3
    assert len({id(table) for table in tables}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_up_to_the_original_length_only_what_should_be_is_changed(name: str) -> None:
    """Scalings have no weights: a model trained with plain rotary positions is read by them as it is."""
    small = {"vocab": 11, "dim": 16, "depth": 2, "heads": 2, "max_length": 12}
    plain, scaled = (mf.build("compose", **small, position=one) for one in ("rope", name))
    scaled.load_state_dict(plain.state_dict())
    tokens = torch.randint(0, 11, (2, 12))
    same = torch.equal(plain(tokens).logits, scaled(tokens).logits)
    near = torch.allclose(plain(tokens).logits, scaled(tokens).logits, atol=1e-5)
    assert same or near if name in ("rope", "rope-dynamic") else not near
