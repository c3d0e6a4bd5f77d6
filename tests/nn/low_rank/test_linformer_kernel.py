"""LinformerKernel: mixtures along the length by hand, documents in any rows, and what is refused."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from layouts import LAYOUTS, LENGTH, ROWS, apart, differentiated, place_of, real_of, tensors
from manyformer.nn import Attention, KernelCall, LinformerKernel, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT
from manyformer.nn.low_rank.linformer_kernel import (
    ConvolvedLengthProjection,
    LearnedLengthProjection,
    LengthProjection,
    PooledLengthProjection,
)
from manyformer.nn.masks import Causal
from manyformer.nn.positions import NoPosition, RotaryPosition
from perturbing import perturb

HEADS, GROUPS, KEY, VALUE = 4, 2, 6, 5
NOWHERE = NoPosition()

MAKERS: dict[str, Any] = {
    "learned": lambda width: LearnedLengthProjection(40, 7),
    "learned by head": lambda width: LearnedLengthProjection(40, 7, heads=GROUPS),
    "mean": lambda width: PooledLengthProjection(40, 7),
    "max": lambda width: PooledLengthProjection(40, 7, reduction="max"),
    "convolution": lambda width: ConvolvedLengthProjection(40, 7, key_dim=width),
    "convolution by head": lambda width: ConvolvedLengthProjection(40, 7, key_dim=width, heads=GROUPS),
}


def shaken(module: LengthProjection) -> Any:
    return perturb(module, 0.5).double()


def mixed_by_hand(lengthwise: LengthProjection, x: Tensor, head: int) -> Tensor:
    """One document (p, e), one slot after the other."""
    if isinstance(lengthwise, LearnedLengthProjection):
        weight = lengthwise.weight[head % len(lengthwise.weight)]
        return torch.stack([sum(weight[s, j] * x[j] for j in range(len(x))) for s in range(lengthwise.slots)])  # type: ignore[misc]
    width = math.ceil(lengthwise.max_length / lengthwise.slots)
    slots = []
    for begin in range(0, len(x), width):
        part = x[begin : begin + width]
        if isinstance(lengthwise, PooledLengthProjection):
            slots.append(part.mean(0) if lengthwise.reduction == "mean" else part.amax(0))
        else:
            assert isinstance(lengthwise, ConvolvedLengthProjection)
            weight = lengthwise.weight[head % len(lengthwise.weight)]
            slots.append((weight[: len(part)] * part).sum(0))
    return torch.stack(slots)


def by_hand(kernel: LinformerKernel, q: Tensor, k: Tensor, v: Tensor, segments: Tensor) -> Tensor:
    y = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(ROWS):
        for number in segments[b].unique().tolist():
            if number == PADDING_SEGMENT:
                continue
            here = (segments[b] == number).nonzero()[:, 0]
            for h in range(HEADS):
                g = h // (HEADS // GROUPS)
                keys, values = (mixed_by_hand(m, x[b, g, here], g) for m, x in ((kernel.keys, k), (kernel.values, v)))
                y[b, h, here] = (q[b, h, here] @ keys.T / math.sqrt(KEY)).softmax(-1) @ values
    return y


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_projection_is_what_it_is_by_hand(layout: str, name: str) -> None:
    place, real = place_of(layout), real_of(layout)
    kernel = LinformerKernel(shaken(MAKERS[name](KEY)), shaken(MAKERS[name](VALUE)))
    qkv = tensors(HEADS, GROUPS, KEY, VALUE)
    grad_output = torch.randn(ROWS, HEADS, LENGTH, VALUE, dtype=torch.float64) * real
    leaves = [*qkv, *kernel.parameters()]
    actual = differentiated(kernel(KernelCall(*qkv, place, place, NOWHERE)).y * real, grad_output, leaves)
    assert apart(actual, differentiated(by_hand(kernel, *qkv, place.segment_ids), grad_output, leaves)) < 1e-10
    seen: list[Tensor] = []
    watched = kernel(KernelCall(*qkv, place, place, NOWHERE, None, lambda m, n, w: seen.append(w))).y * real
    assert apart((watched.detach(),), (actual[0].detach(),)) < 1e-10
    assert seen[0].shape[-1] >= 1


def test_as_many_slots_as_tokens_are_full_attention() -> None:
    place = place_of("plain")
    qkv = tensors(HEADS, GROUPS, KEY, VALUE)
    whole = LearnedLengthProjection(LENGTH, LENGTH).double()
    whole.weight.data.copy_(torch.eye(LENGTH))
    full = SoftmaxKernel()(KernelCall(*qkv, place, place, NOWHERE)).y
    assert apart((LinformerKernel(whole)(KernelCall(*qkv, place, place, NOWHERE)).y,), (full,)) < 1e-10
    assert (
        apart(
            (LinformerKernel(PooledLengthProjection(LENGTH, LENGTH))(KernelCall(*qkv, place, place, NOWHERE)).y,),
            (full,),
        )
        < 1e-10
    )


def test_random_projections_keep_products() -> None:
    """Johnson and Lindenstrauss: the error of P E^T E V falls as 1 / sqrt(slots) for E of variance 1 / slots."""
    weights, values = torch.randn(8, 256, dtype=torch.float64).softmax(-1), torch.randn(256, 8, dtype=torch.float64)
    counts, errors = [16, 32, 64, 128, 256], []
    for count in counts:
        squares = []
        for _ in range(30):
            e = LearnedLengthProjection(256, count).double()
            e.weight.data.normal_(std=count**-0.5)
            mixed = e(values[None, None]).x[0, 0]
            expected = weights @ values
            squares.append(((weights @ e.weight[0].T @ mixed - expected).norm() / expected.norm()).square().item())
        errors.append(0.5 * math.log(sum(squares) / len(squares)))
    slope = (errors[-1] - errors[0]) / math.log(counts[-1] / counts[0])
    assert -0.6 < slope < -0.4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: LinformerKernel(LearnedLengthProjection(8, 4), mask=Causal()),
            r"mask Causal\(\): each slot mixes all tokens",
        ),
        (
            lambda: LinformerKernel(LearnedLengthProjection(8, 4), LearnedLengthProjection(8, 3)),
            r"keys have 4 slots, so values need as many, not 3",
        ),
        (lambda: LearnedLengthProjection(8, 0), r"slots \(0\) must be at least 1"),
        (lambda: PooledLengthProjection(8, 9), r"slots \(9\) must not exceed max_length \(8\)"),
        (
            lambda: Attention(8, 2, LinformerKernel(LearnedLengthProjection(8, 4)), position=RotaryPosition(4)),
            r"LinformerKernel does not support",
        ),
        (
            lambda: mf.build("linformer", top_projected_length=3),
            r"one projection for all layers: they cannot have projected lengths from 128 to 3",
        ),
        (lambda: mf.build("linformer", projection="max", projection_sharing="heads"), r"has no weights to share"),
        (
            lambda: mf.build("linformer", projected_length=None, top_projected_length=3),
            r"top_projected_length \(3\) needs a projected_length",
        ),
    ],
)
def test_mistakes_get_a_sentence(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("layout", ["plain", "packed"])
def test_documents_that_are_too_long_get_a_sentence(layout: str) -> None:
    place = place_of(layout)
    with pytest.raises(ValueError, match="built for max_length=9"):
        LinformerKernel(LearnedLengthProjection(9, 4))(
            KernelCall(*tensors(HEADS, GROUPS, KEY, VALUE, torch.float32), place, place, NOWHERE)
        )


def test_who_shares() -> None:
    def projections(**words: Any) -> list[LearnedLengthProjection]:
        model = mf.build("linformer", vocab=11, dim=8, depth=3, heads=2, max_length=16, projected_length=6, **words)
        modules = [m for m in model.modules() if isinstance(m, LearnedLengthProjection)]
        # layers that share a projection have modules of their own with the same weights
        return list({id(m.weight): m for m in modules}.values())

    assert [(len(p.weight), p.slots) for p in projections()] == [(1, 6)]
    assert [
        (len(p.weight), p.slots) for p in projections(projection_sharing="keys-values", top_projected_length=2)
    ] == [(1, 6), (1, 4), (1, 2)]
    assert [len(p.weight) for p in projections(projection_sharing="heads")] == [1] * 6
    assert [len(p.weight) for p in projections(projection_sharing="none")] == [2] * 6


def test_without_a_projection_it_is_one_that_keeps_every_key() -> None:
    words: dict[str, Any] = {"vocab": 11, "dim": 8, "depth": 2, "heads": 2, "max_length": 9, "dropout": 0.0}
    plain: Any = mf.build("linformer", **words, projected_length=None)
    projected: Any = mf.build("linformer", **words, projected_length=9)
    projections = {name: torch.eye(9)[None] for name in projected.state_dict() if name not in plain.state_dict()}
    assert projections
    projected.load_state_dict({**plain.state_dict(), **projections})
    tokens = torch.randint(0, 11, (2, 9))
    torch.testing.assert_close(plain(tokens).logits, projected(tokens).logits)


def test_it_says_how() -> None:
    place, qkv = place_of("plain"), tensors(HEADS, GROUPS, KEY, VALUE)
    kernel = LinformerKernel(LearnedLengthProjection(40, 7))
    assert kernel.explain(KernelCall(*qkv, place, place, NOWHERE)) == "sdpa: 7 slots in place of 23 keys"
    assert "watched" in kernel.explain(KernelCall(*qkv, place, place, NOWHERE, None, lambda m, n, w: None))
