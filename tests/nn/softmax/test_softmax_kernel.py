"""Softmax attention: every path equals the definition, gradients too, and says which one it is."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from manyformer.models.embedding import positions_of
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, TokenPositions
from manyformer.nn.masks import (
    AllKeys,
    AtPositions,
    Causal,
    GlobalTokens,
    Mask,
    NoKeys,
    PerHead,
    SameDocument,
    Window,
    symmetric_window,
)
from manyformer.nn.ops import softmax_attention
from manyformer.nn.ops.softmax_attention import fused_attention, map_documents, softmax_attention_reference
from manyformer.nn.positions import NoPosition, Position
from manyformer.nn.softmax import softmax_kernel
from manyformer.nn.softmax.sparse_plan import _plan_for_layouts as plans
from softmax_calls import HEADS, KEY, VALUE, inputs, run
from token_rows import segment_positions


class Later(Position):
    """A score that falls with the distance, so that forming scores matters."""

    def score(
        self, logits: Tensor, q: Tensor, k: Tensor, query_positions: TokenPositions, key_positions: TokenPositions
    ) -> Tensor:
        return logits - (
            query_positions.position_ids[:, None, :, None] - key_positions.position_ids[:, None, None, :]
        ).abs().to(logits.dtype)


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One (query, head) at a time, over the keys it sees."""
    repeats = q.shape[1] // k.shape[1]
    y = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = mask[b % mask.shape[0], h % mask.shape[1], i].nonzero()[:, 0]
                if len(seen):
                    weights = (k[b, h // repeats, seen] @ q[b, h, i] * scale).softmax(0)
                    y[b, h, i] = weights @ v[b, h // repeats, seen]
    return y


def assert_equal(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


LAYOUTS = {
    "plain": [[0] * 7, [0] * 7],
    "one token": [[0], [0]],
    "right padding": [[0] * 7, [0] * 3 + [PADDING_SEGMENT] * 4],
    "left padding": [[0] * 7, [PADDING_SEGMENT] * 4 + [0] * 3],
    "packed": [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 2, 2, PADDING_SEGMENT, PADDING_SEGMENT]],
    "gaps": [[PADDING_SEGMENT, 0, 0, PADDING_SEGMENT, 1, 1, 1], [PADDING_SEGMENT] * 7],
    "in pieces": [[0, 0, 1, 1, 0, 1, 0], [0, 1, 0, PADDING_SEGMENT, 0, 1, 2]],
}


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", [Causal(), AllKeys(), PerHead({1: Causal()}, default=~Causal())], ids=repr)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_path_is_the_definition(layout: str, mask: Mask, groups: int) -> None:
    place = segment_positions(LAYOUTS[layout])
    qkv = inputs(place, groups)
    real = (place.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    # nobody asks what padding computes, so nothing flows back from it
    grad_output = torch.randn(*qkv[0].shape[:3], VALUE, dtype=torch.float64) * real
    dense = mask.dense(place, place, HEADS)
    y = by_hand(*qkv, dense, 1 / math.sqrt(KEY))
    expected = (y * real, *torch.autograd.grad((y * grad_output).sum(), qkv))
    paths: list[Any] = ["auto", "naive", "sdpa", "sparse", "blocked"]
    if mask in (Causal(), AllKeys()) and layout not in ("plain", "one token", "in pieces"):
        paths.append("documents")
    for path in paths:
        y, *gradients = run(SoftmaxKernel(mask, path=path), qkv, grad_output, place, place)
        assert_equal((y * real, *gradients), expected)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_every_path_agrees_on_any_rows(data: st.DataObject) -> None:
    length = data.draw(st.integers(1, 9))
    segments = st.lists(st.integers(PADDING_SEGMENT, 2), min_size=length, max_size=length)
    place = segment_positions(data.draw(st.lists(segments, min_size=1, max_size=3)))
    mask = data.draw(st.sampled_from([Causal(), AllKeys(), ~Causal(), Causal() & SameDocument()]))
    qkv = inputs(place, 2)
    real = (place.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    grad_output = torch.randn(*qkv[0].shape[:3], VALUE, dtype=torch.float64) * real
    wanted, *expected = run(SoftmaxKernel(mask, path="naive"), qkv, grad_output, place, place)
    for path in ("auto", "sdpa", "sparse"):
        y, *gradients = run(SoftmaxKernel(mask, path=path), qkv, grad_output, place, place)  # type: ignore[arg-type]
        assert_equal((y * real, *gradients), (wanted, *expected))


@pytest.mark.parametrize("path", ["auto", "naive", "sdpa", "sparse", "blocked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_that_see_nothing_are_zero_with_finite_gradients(path: Any, dtype: torch.dtype) -> None:
    place = segment_positions([[0, 0, 0, PADDING_SEGMENT], [PADDING_SEGMENT] * 4])
    qkv = tuple(x.detach().to(dtype).requires_grad_() for x in inputs(place, HEADS))
    for mask in (NoKeys(), ~Causal(), PerHead({0: AllKeys()})):
        y, *gradients = run(SoftmaxKernel(mask, path=path), qkv, torch.ones((), dtype=dtype), place, place)
        blind = ~mask.dense(place, place, HEADS).any(-1).expand(2, HEADS, 4)
        assert blind.any()
        assert (y[blind] == 0).all()
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_rows_of_nothing_but_padding_have_gradients() -> None:
    place = segment_positions([[PADDING_SEGMENT] * 3] * 2)
    for mask in (Causal(), AllKeys()):
        _, *gradients = run(
            SoftmaxKernel(mask), inputs(place, HEADS), torch.ones((), dtype=torch.float64), place, place
        )
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_padding_between_documents_is_zero_on_their_path() -> None:
    place = segment_positions(LAYOUTS["gaps"])
    y = SoftmaxKernel(Causal(), path="documents")(KernelCall(*inputs(place, HEADS), place, place, NoPosition())).y
    hidden = (place.segment_ids == PADDING_SEGMENT)[:, None].expand(-1, HEADS, -1)
    assert (y[hidden] == 0).all()
    assert not (y[~hidden] == 0).any()


@pytest.mark.parametrize(("past", "new"), [(5, 1), (5, 3), (0, 4)])
def test_queries_at_the_end_of_a_cache(past: int, new: int) -> None:
    """The last queries see every earlier key: torch's own causal flag would align them with the first keys."""
    full = segment_positions([[0] * (past + new)] * 2)
    q, k, v = inputs(full, 2)
    everything = SoftmaxKernel(Causal(), path="naive")(KernelCall(q, k, v, full, full, NoPosition())).y[:, :, past:]
    at = positions_of(torch.zeros(2, past + new, dtype=torch.long), None, None)[0]
    late = at._replace(
        position_ids=at.position_ids[:, past:],
        segment_ids=at.segment_ids[:, past:],
        layout=at.layout._replace(start=past),
    )  # type: ignore
    for path in ("auto", "sdpa", "naive"):
        y = SoftmaxKernel(Causal(), path=path)(KernelCall(q[:, :, past:], k, v, late, at, NoPosition())).y  # type: ignore[arg-type]
        torch.testing.assert_close(y, everything, atol=1e-10, rtol=0)


def test_scale_and_position_enter_the_scores() -> None:
    place = segment_positions([[0] * 5])
    q, k, v = inputs(place, HEADS)
    y = SoftmaxKernel(Causal(), scale=0.3)(KernelCall(q, k, v, place, place, Later())).y
    far = (place.position_ids[0][:, None] - place.position_ids[0][None, :]).abs()
    logits = (q @ k.mT * 0.3 - far).masked_fill(~Causal().dense(place, place, HEADS), -torch.inf)
    torch.testing.assert_close(y, logits.softmax(-1) @ v, atol=1e-10, rtol=0)


def test_dropout_is_for_training_and_keeps_the_mean() -> None:
    place = segment_positions([[0] * 64])
    q, k = (torch.zeros(1, HEADS, 64, KEY) for _ in range(2))
    v = torch.ones(1, HEADS, 64, VALUE)
    for path in ("naive", "sdpa"):
        kernel = SoftmaxKernel(dropout=0.5, path=path)  # type: ignore[arg-type]
        y = kernel(KernelCall(q, k, v, place, place, NoPosition())).y
        assert y.std() > 0.05
        assert abs(y.mean().item() - 1) < 0.05
        assert (kernel.eval()(KernelCall(q, k, v, place, place, NoPosition())).y - 1).abs().max() < 1e-6


def test_softmax_is_taken_in_float32() -> None:
    """300 equal scores in bfloat16: summing the exponentials there would be off by percents."""
    place = segment_positions([[0] * 300])
    q, k, v = (torch.ones(1, 1, 300, 2, dtype=torch.bfloat16) for _ in range(3))
    mask = AllKeys().dense(place, place, 1)
    weights = softmax_attention_reference(
        q, k, v, mask, scale=1.0, position=NoPosition(), query_positions=place, key_positions=place
    )[1]
    assert weights.dtype == torch.bfloat16
    assert (weights.float() - 1 / 300).abs().max() < 1 / 300 / 128


def choice(
    kernel: SoftmaxKernel,
    positions: TokenPositions,
    key_positions: TokenPositions | None = None,
    position: Position | None = None,
) -> str:
    keys = positions if key_positions is None else key_positions
    return kernel.explain(
        KernelCall(*inputs(positions, HEADS, keys), positions, keys, NoPosition() if position is None else position)
    )


def test_it_says_which_way_it_goes_and_why() -> None:
    plain, last = segment_positions([[0] * 7]), segment_positions([[0]])
    seventh = last._replace(layout=last.layout._replace(start=6))  # type: ignore
    assert choice(SoftmaxKernel(), plain) == "sdpa: every key is visible"
    assert choice(SoftmaxKernel(Causal()), plain) == "sdpa: causal from the first token on, by torch's flag"
    assert choice(SoftmaxKernel(Causal()), seventh, plain) == "sdpa: every key lies in the past"
    padded = segment_positions(LAYOUTS["right padding"])
    assert choice(SoftmaxKernel(Causal()), padded) == "sdpa: causal with padding on the right, which no token sees"
    assert choice(SoftmaxKernel(), padded) == "sdpa: the dense mask of AllKeys() for these positions"
    assert choice(SoftmaxKernel(Causal(), path="naive"), plain) == "naive: forced"
    assert choice(SoftmaxKernel(Causal(), path="documents"), padded) == "documents: forced"
    few = "naive: Later acts on the score of each pair, and there are few pairs"
    assert choice(SoftmaxKernel(), plain, position=Later()) == few
    packed = segment_positions([[n // 50 for n in range(200)]] * 2)
    assert choice(SoftmaxKernel(Causal()), packed) == "documents: 8 documents in 2 packed rows, one call each"
    tiny = segment_positions([[0, 0, 1, 1]])
    assert choice(SoftmaxKernel(Causal()), tiny) == "sdpa: the dense mask of Causal() for these positions"


def test_watching_takes_the_written_out_form() -> None:
    place = segment_positions([[0] * 4])
    seen: list[Tensor] = []
    arguments = (*inputs(place, HEADS), place, place, NoPosition(), None)
    kernel = SoftmaxKernel(Causal())
    assert kernel.explain(KernelCall(*arguments, lambda module, name, value: seen.append(value))).startswith(
        "naive: the weights"
    )
    kernel(KernelCall(*arguments, lambda module, name, value: seen.append(value)))
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(1, HEADS, 4, dtype=torch.float64))


@pytest.mark.usefixtures("unchecked")
def test_a_forced_path_that_cannot_serve_is_refused() -> None:
    place, packed = segment_positions([[0] * 7]), segment_positions(LAYOUTS["packed"])
    with pytest.raises(ValueError, match="path 'sdpa' cannot serve this call: Later acts on the score"):
        choice(SoftmaxKernel(Causal(), path="sdpa"), place, position=Later())
    for mask, rows in (
        (Causal(), place),
        (PerHead({0: Causal()}), packed),
        (Causal(), segment_positions(LAYOUTS["in pieces"])),
    ):
        kernel = SoftmaxKernel(mask, path="documents")
        with pytest.raises(ValueError, match="path 'documents' needs packed self-attention"):
            kernel(KernelCall(*inputs(rows, HEADS), rows, rows, NoPosition()))
    wrong: Any = "fused"
    with pytest.raises(
        ValueError, match="path 'fused' does not exist; choose from auto, naive, sdpa, documents, sparse"
    ):
        SoftmaxKernel(path=wrong)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize(
    "mask",
    [Window(3), PerHead({0: Window(2)}, default=Window(1, 2)), symmetric_window(2) | GlobalTokens(AtPositions(0))],
    ids=repr,
)
def test_packed_documents_are_seen_one_by_one(mask: Mask, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as under one mask for whole rows, with documents of every size: dense, in blocks, taken for longer."""
    monkeypatch.setattr(softmax_kernel, "MIN_PAIRS_FOR_PLAN", 50)
    monkeypatch.setattr(softmax_kernel, "LENGTH_ROUNDING", {1: 4, 50: 8})
    monkeypatch.setattr(softmax_kernel, "MIN_DOCUMENT_LENGTH", 12)
    place = segment_positions(
        [[0] + [1] * 5 + [2] * 30 + [3] * 9, [PADDING_SEGMENT] * 3 + [4] * 12 + [PADDING_SEGMENT] + [5] * 27 + [6] * 2]
    )
    kernel, qkv = SoftmaxKernel(mask), inputs(place, groups)
    assert choice(kernel, place) == "documents: 7 documents in 2 packed rows, one call each"
    real = (place.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    grad_output = torch.randn(*qkv[0].shape[:3], VALUE, dtype=torch.float64) * real
    y, *gradients = run(kernel, qkv, grad_output, place, place)
    assert not y.masked_select(~real).any()
    wanted, *expected = run(SoftmaxKernel(mask, path="naive"), qkv, grad_output, place, place)
    assert_equal((y, *gradients), (wanted * real, *expected))
    # short ones share blocks
    assert not choice(kernel, segment_positions([[column // 5 for column in range(45)]])).startswith("documents")
    # roles are of single tokens
    marked = place._replace(roles=torch.zeros_like(place.position_ids))
    assert choice(kernel, marked).startswith(("sdpa", "sparse"))


def test_rows_with_plans_of_their_own_are_planned_if_they_are_long() -> None:
    """Rows that differ in roles, as questions do, are planned in every step; short ones are computed sooner."""
    kernel = SoftmaxKernel(Window(20))
    for length, path in [(400, "sdpa"), (1000, "sparse")]:
        place = segment_positions([[0] * length])
        with_roles = place._replace(roles=torch.zeros_like(place.position_ids))
        assert choice(kernel, place).startswith("sparse")
        assert choice(kernel, with_roles).startswith(path)


def test_documents_of_nearly_one_length_share_a_plan() -> None:
    """Packed text has documents of any length, and planning takes as long as a step."""
    kernel = SoftmaxKernel(Window(20))
    plans.cache_clear()
    for length in (390, 500, 510, 512):
        place = segment_positions([[0] * length + [1] * 30])
        kernel(KernelCall(*inputs(place, HEADS), place, place, NoPosition()))
    assert plans.cache_info().misses == 1
    every = SoftmaxKernel(Window(20, 20))
    for length in (500, 510):
        place = segment_positions([[0] * length + [1] * 30])
        every(KernelCall(*inputs(place, HEADS), place, place, NoPosition()))
    assert plans.cache_info().misses == 3, "whoever sees later tokens would see those that are not there"


def test_a_mask_made_while_evaluating_serves_training() -> None:
    place, kernel = segment_positions([[0] * 9]), SoftmaxKernel(Window(7))
    qkv = inputs(place, HEADS)
    with torch.inference_mode():
        kernel(KernelCall(*qkv, place, place, NoPosition()))
    _, *gradients = run(kernel, qkv, torch.ones((), dtype=torch.float64), place, place)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_documents_keep_their_gradient_in_one_piece() -> None:
    """Rows laid end to end and cut: many slices would each cost a gradient of full size."""
    place = segment_positions(LAYOUTS["packed"])
    q, k, v = inputs(place, HEADS)
    attend = partial(fused_attention, mask=None, causal=True, scale=1.0)
    y = map_documents(q, k, v, place.layout, attend)  # type: ignore[arg-type]
    names, todo = [], [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None:
            names.append(node.name())
            todo.extend(parent for parent, _ in node.next_functions)
    assert set(names) & {"SliceBackward0", "IndexBackward0"} == set()


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(64), Causal() & AtPositions(0, 1, 5)], ids=repr)
def test_few_queries_take_no_block_mask_on_a_gpu(mask: Mask) -> None:
    """A block mask of a decoded token would be made by the host, for each layer; shapes alone stand for a GPU."""
    for queries, path in [(1, "sdpa"), (127, "sdpa"), (128, "flex")]:
        with FakeTensorMode(allow_non_fake_inputs=True):
            # rows of unlike lengths: nothing is known about the positions
            query_ids, ids = (torch.empty(3, n, dtype=torch.long, device="cuda") for n in (queries, 300))
            q, kv = torch.empty(3, HEADS, queries, 32, device="cuda"), torch.empty(3, 2, 300, 32, device="cuda")
            places = TokenPositions(query_ids, query_ids), TokenPositions(ids, ids)
            reason = SoftmaxKernel(mask).explain(KernelCall(q, kv, kv, *places, NoPosition()))
        assert reason.startswith(path)
        assert ("FlexAttention is for 128 queries or more" in reason) is (path == "sdpa")


@pytest.mark.parametrize("queries", [1, 100])
def test_a_query_without_keys_gets_zeros_from_kernels_that_give_nan(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused kernels of GPUs differ in what they give for such a query: it is shown keys, and its output is dropped."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def strict(*args: Tensor, attn_mask: Tensor, **options: Any) -> Tensor:
        assert attn_mask.any(-1).all()
        return attention(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(softmax_attention, "needs_a_key", lambda q: True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", strict)
    place = segment_positions([[-1] * 30 + [0] * 90, [0] * 110 + [-1] * 10])
    place = place._replace(layout=None)
    query_place = place.columns(120 - queries, 120)
    qkv = inputs(query_place, 2, place)
    grad_output = torch.randn(2, HEADS, queries, VALUE, dtype=torch.float64)
    kernel = SoftmaxKernel(Causal() & Window(50), path="sdpa")
    actual = run(kernel, qkv, grad_output, query_place, place)
    assert_equal(actual, run(SoftmaxKernel(kernel.mask, path="naive"), qkv, grad_output, query_place, place))
