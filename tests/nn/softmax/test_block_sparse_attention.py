"""What a mask shows and nothing else: bounds are never wrong, every plan is dense attention, gradients too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyformer.analysis.benchmarks import LargestTensorMode
from manyformer.inference.generate.captured_step import StaticOperatorsOnly
from manyformer.nn import KernelCall, SoftmaxKernel
from manyformer.nn import masks as m
from manyformer.nn.core import PADDING_SEGMENT, TokenPositions
from manyformer.nn.masks import AndMask, Mask, NotMask, OrMask, PerHead
from manyformer.nn.masks.mask import take_tokens
from manyformer.nn.positions import NoPosition
from manyformer.nn.runtime.costs import count_flops
from manyformer.nn.softmax import block_sparse_attention, flex_attention
from manyformer.nn.softmax.block_cover import block_bounds, cover_blocks, order_into_blocks
from manyformer.nn.softmax.sparse_plan import make_sparse_plan
from softmax_calls import HEADS, inputs, run
from token_rows import segment_positions

tokens = st.one_of(
    st.builds(m.FirstTokens, st.integers(0, 20)),
    st.builds(m.AtPositions, st.integers(0, 40), st.integers(0, 40)),
    st.builds(lambda p, b, n: m.PeriodicTokens(p, b % p, min(b % p + n, p)), *[st.integers(1, 9)] * 3),
    st.builds(m.WithRole, st.integers(0, 2)),
)
tokens = st.one_of(tokens, st.builds(lambda a, b: a | b, tokens, tokens))

leaves: st.SearchStrategy[Mask] = st.one_of(
    st.sampled_from([m.AllKeys(), m.NoKeys(), m.Causal(), m.SameDocument(), m.SamePart()]),
    st.builds(m.Window, st.integers(1, 30), st.integers(0, 20), st.integers(1, 3)),
    st.builds(m.Stride, st.integers(1, 9)),
    st.builds(m.LocalBlocks, st.integers(1, 20), st.integers(0, 9), st.integers(0, 9)),
    st.builds(lambda order: m.PermutedBlocks(7, *order), st.permutations(range(4))),
    st.builds(m.BlockCausal, st.integers(1, 20)),
    st.builds(lambda w, r, a, b: m.Local2D(2 * w, r, w, a, b), *[st.integers(1, 4)] * 4),
    st.builds(m.RandomBlocks, st.integers(1, 8), st.integers(0, 3), st.integers(1, 9), st.integers(0, 3)),
    st.builds(m.RandomBlocks, st.just(5), st.just(2), st.just(8), past_only=st.just(True)),
    st.builds(m.VisibleToAll, tokens),
    st.builds(m.AttendsToAll, tokens),
    st.builds(m.GlobalTokens, tokens),
)


def _larger(masks: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    return st.one_of(
        st.builds(AndMask, masks, masks),
        st.builds(OrMask, masks, masks),
        st.builds(NotMask, masks),
        st.builds(lambda a, b: PerHead({1: a}, default=b), masks, masks),
    )


expressions = st.recursive(leaves, _larger, max_leaves=5)


APART = ((torch.float32, 1e-5), (torch.float64, 1e-10))
"""How near sparse attention must be to dense attention, by type."""


@st.composite
def places(draw: st.DrawFn, most: int = 40) -> TokenPositions:
    """Rows as they come: whole, padded, packed, with documents in pieces; with and without roles and parts."""
    length = draw(st.integers(1, most))
    kind = draw(st.sampled_from(["plain", "right", "any"]))
    if kind == "plain":
        rows = [[0] * length] * 2
    elif kind == "right":
        ends = [draw(st.integers(0, length)) for _ in range(2)]
        rows = [[0] * end + [PADDING_SEGMENT] * (length - end) for end in ends]
    else:
        numbers = st.lists(st.integers(PADDING_SEGMENT, 2), min_size=length, max_size=length)
        rows = [sorted(draw(numbers)), draw(numbers)]
    place = segment_positions(rows)
    if draw(st.booleans()):
        place = place._replace(roles=torch.randint(0, 3, place.position_ids.shape))
    return place._replace(part_ids=place.position_ids // 5 - draw(st.integers(0, 1))) if draw(st.booleans()) else place


@given(expressions, places(), places(), st.integers(1, 9), st.sampled_from([None, 2, 3]))
@settings(max_examples=150, deadline=None)
def test_bounds_are_never_wrong(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions, size: int, period: int | None
) -> None:
    """`any_visible` of a pair of blocks is true where anything is visible, `all_visible` only where everything is."""
    mask = mask.for_head(1)
    assert not mask.per_head
    row, column = take_tokens(query_positions, 0), take_tokens(key_positions, 1 % key_positions.position_ids.shape[0])
    q, k = order_into_blocks(row, None, period, size), order_into_blocks(column, None, None, size)
    spans = [block_bounds(place, order.blocks, mask.periods) for place, order in ((row, q), (column, k))]
    dense = mask(torch.tensor(0), take_tokens(row, (slice(None), None)), take_tokens(column, (None, slice(None))))
    dense = dense.expand(len(row.position_ids), len(column.position_ids))
    blocks = dense[q.blocks][:, :, k.blocks].transpose(1, 2)
    bounds = mask.bounds(spans[0].select((slice(None), None)), spans[1].select(None))
    assert (bounds.any_visible | ~blocks.flatten(2).any(-1)).all()
    assert (~bounds.all_visible | blocks.flatten(2).all(-1)).all()
    actual = cover_blocks(mask, *spans)
    pairs = set(zip(actual.rows.tolist(), actual.columns.tolist()))
    assert pairs == {tuple(pair) for pair in bounds.any_visible.expand(len(q.blocks), len(k.blocks)).nonzero().tolist()}


@given(expressions, places())
@settings(max_examples=120, deadline=None)
def test_terms_and_heads_are_the_mask(mask: Mask, positions: TokenPositions) -> None:
    dense = mask.dense(positions, positions, HEADS).expand(-1, HEADS, -1, -1)
    for head in range(HEADS):
        one = mask.for_head(head)
        assert (one.dense(positions, positions, 1)[:, 0] == dense[:, head]).all()
        union = m.union([m.NoKeys(), *one.disjuncts()])
        assert (union.dense(positions, positions, 1)[:, 0] == dense[:, head]).all()


@given(expressions, places(), st.sampled_from([1, 2, 4]), st.integers(2, 16), st.sampled_from(APART))
@settings(max_examples=80, deadline=None)
def test_any_expression_is_dense_attention(
    mask: Mask, positions: TokenPositions, groups: int, size: int, apart: tuple[torch.dtype, float]
) -> None:
    """Outputs and gradients, heads alike or not; small blocks, so that rows of a few tokens have many of them."""
    qkv = inputs(positions, groups) if size % 2 else alike(positions, groups)
    qkv = tuple(x.detach().to(apart[0]).requires_grad_() for x in qkv)  # type: ignore[assignment]
    real = (positions.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    grad_output = torch.randn(*qkv[0].shape[:3], qkv[2].shape[-1], dtype=apart[0]) * real
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, size)
        actual, *gradients = run(SoftmaxKernel(mask, path="sparse"), qkv, grad_output, positions, positions)
    wanted, *expected = run(SoftmaxKernel(mask, path="naive"), qkv, grad_output, positions, positions)
    assert_near((actual * real, *gradients), (wanted * real, *expected), apart[1])


def small_blocks(patch: pytest.MonkeyPatch, size: int) -> None:
    from manyformer.nn.softmax import sparse_plan
    from manyformer.nn.softmax import sparse_plan as plans

    patch.setattr(plans, "BLOCK", size)
    for name, value in (("PAIR_RATES", {size: 1.0, 2 * size: 1.0}), ("CALL", 0), ("GATHERED_KEY", 0)):
        patch.setattr(sparse_plan, name, value)
    plans._plan_for_layouts.cache_clear()
    plans._recipe_for_layouts.cache_clear()


def alike(positions: TokenPositions, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values as wide as keys, which is what torch's kernel takes."""
    q, k, _ = inputs(positions, groups)
    return q, k, torch.randn_like(k, requires_grad=True)


def assert_near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], apart: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=apart, rtol=apart)


LONG = 397
MANY = {
    "window": m.Window(50),
    "window in float heads": PerHead({0: m.Window(33), 1: m.Window(9, dilation=4)}, default=m.symmetric_window(20)),
    "strided": m.union(m.strided_pattern(20)),
    "fixed": m.union(m.fixed_pattern(32, 4)),
    "longformer": m.symmetric_window(30) | m.GlobalTokens(m.AtPositions(0, 77, 300)),
    "roles": m.symmetric_window(30) | m.GlobalTokens(m.WithRole(1)),
    "bigbird": m.Causal()
    & (m.Window(40) | m.VisibleToAll(m.FirstTokens(16)) | m.RandomBlocks(16, 3, 25, past_only=True)),
    "etc": m.four_piece_pattern(m.FirstTokens(12), l2l=m.symmetric_window(25), g2g=m.Causal()),
    "image": m.Local2D(20, 4, 5, 4, 5),
    "blocks": PerHead({0: m.PermutedBlocks(100, 1, 2, 3, 0)}, default=m.LocalBlocks(100)),
    "almost all": ~m.Window(30),
    "blocks in turn": m.BlockCausal(70),
}
ROWS = {
    "plain": [[0] * LONG] * 2,
    "right padding": [[0] * LONG, [0] * 200 + [PADDING_SEGMENT] * (LONG - 200)],
    "left padding": [[0] * LONG, [PADDING_SEGMENT] * 150 + [0] * (LONG - 150)],
    "packed": [[0] * 101 + [1] * (LONG - 101), [0] * 20 + [1] * 300 + [PADDING_SEGMENT] * (LONG - 320)],
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", MANY)
def test_patterns_are_dense_attention(name: str, rows: str) -> None:
    """At an odd length, in both precisions."""
    mask, place = MANY[name], segment_positions(ROWS[rows])
    if name == "roles":
        place = place._replace(roles=(torch.rand(place.position_ids.shape) < 0.02).long())
    real = (place.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    wide = alike(place, 2)
    for dtype, apart in APART:
        qkv = tuple(x.detach().to(dtype).requires_grad_() for x in wide)
        grad_output = torch.randn(*qkv[0].shape[:3], qkv[2].shape[-1], dtype=dtype) * real
        actual, *gradients = run(SoftmaxKernel(mask, path="sparse"), qkv, grad_output, place, place)
        wanted, *expected = run(SoftmaxKernel(mask, path="naive"), qkv, grad_output, place, place)
        assert_near((actual * real, *gradients), (wanted * real, *expected), apart)


@pytest.mark.parametrize(("kept", "held"), [(True, True), (True, False), (False, False)])
def test_kept_or_made_anew(kept: bool, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights and gathered keys that are kept for the gradient and without, a few scores at a time."""
    monkeypatch.setattr(
        block_sparse_attention, "MAX_SAVED_WEIGHTS", block_sparse_attention.MAX_SAVED_WEIGHTS if kept else 0
    )
    monkeypatch.setattr(
        block_sparse_attention, "MAX_SAVED_KEYS_VALUES", block_sparse_attention.MAX_SAVED_KEYS_VALUES if held else 0
    )
    monkeypatch.setattr(block_sparse_attention, "SCORES_PER_STEP", 1 << 13)
    place = segment_positions(ROWS["packed"])
    q, k, v = alike(place, 2)
    real = (place.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    grad_output = torch.randn_like(q) * real
    for mask in (MANY["longformer"], MANY["strided"], m.Window(40) & ~m.Window(3), m.RandomBlocks(100, 2, 4)):
        actual, *gradients = run(SoftmaxKernel(mask, path="sparse"), (q, k, v), grad_output, place, place)
        wanted, *expected = run(SoftmaxKernel(mask, path="naive"), (q, k, v), grad_output, place, place)
        assert_near((actual * real, *gradients), (wanted * real, *expected), 1e-10)


@pytest.mark.parametrize("name", ["window", "strided", "bigbird", "window in float heads"])
def test_heads_side_by_side(name: str) -> None:
    """As projections leave them: channels of one head are neighbours, tokens of one head are not."""
    place = segment_positions(ROWS["plain"])
    wide = [torch.randn(2, LONG, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad_output = torch.randn(2, 4, LONG, 6, dtype=torch.float64)
    actual = []
    for path in ("sparse", "naive"):
        y = SoftmaxKernel(MANY[name], path=path)(
            KernelCall(*(x.transpose(1, 2) for x in wide), place, place, NoPosition())
        ).y
        actual.append((y, *torch.autograd.grad(y, wide, grad_output)))
    assert_near(*actual, 1e-10)


@pytest.mark.usefixtures("unchecked")
def test_rows_that_see_a_block_less_share_a_call() -> None:
    """BigBird's second row and last but one see a global block among their neighbours."""
    place, ends = segment_positions([[0] * 1152]), m.AtPositions(*range(64), *range(1088, 1152))
    mask = (
        m.LocalBlocks(64, lookback=64, lookahead=64)
        | m.GlobalTokens(ends)
        | m.RandomBlocks(64, 3, 18, skip_first=1, skip_last=1)
    )
    shared, *single = make_sparse_plan(mask, place, place, HEADS).rows[0]
    assert shared.heads == tuple(range(HEADS))
    assert [lane.heads for lane in single] == [(head,) for head in range(HEADS)]
    for lane in single:
        ((tiles,),) = (part.tiles for part in lane.parts)
        assert tiles.rows_adjacent
        assert tiles.rows.tolist() == list(range(1, 17))
        assert tiles.shorter_rows == ((0, 7), (15, 7))
    assert all(part.is_exclusive for lane in (shared, *single) for part in lane.parts)
    qkv = inputs(place, HEADS)
    grad_output = torch.randn(1, HEADS, 1152, qkv[2].shape[-1], dtype=torch.float64)
    actual = [
        run(SoftmaxKernel(mask, path=path), qkv, grad_output, place, place)  # type: ignore[arg-type]
        for path in ("sparse", "blocked", "naive")
    ]
    assert_near(tuple(actual[0]), tuple(actual[2]), 1e-10)
    assert_near(tuple(actual[1]), tuple(actual[2]), 1e-10)


def test_gradients_by_differences() -> None:
    place = segment_positions([[0] * 9])
    q, k, v = (torch.randn(1, 2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kernel = SoftmaxKernel(m.Window(4) | m.VisibleToAll(m.FirstTokens(1)), path="sparse")
    assert torch.autograd.gradcheck(lambda *qkv: kernel(KernelCall(*qkv, place, place, NoPosition())).y, (q, k, v))


@pytest.mark.parametrize("name", ["window", "strided", "fixed", "bigbird", "image"])
def test_nothing_leaks_from_the_future(name: str) -> None:
    """Not even through what merging computes with: the numbers of the future may be anything finite."""
    mask = m.Causal() & MANY[name]
    place = segment_positions(ROWS["plain"])
    q, k, v = (x.detach().float() for x in alike(place, 2))
    kernel, cut = SoftmaxKernel(mask, path="sparse"), 211
    before = kernel(KernelCall(q, k, v, place, place, NoPosition())).y[:, :, :cut]
    for x in (q, k, v):
        x[:, :, cut:] = 50 * torch.randn_like(x[:, :, cut:])
    assert (kernel(KernelCall(q, k, v, place, place, NoPosition())).y[:, :, :cut] == before).all()
    k.requires_grad_()
    (gradient,) = torch.autograd.grad(kernel(KernelCall(q, k, v, place, place, NoPosition())).y[:, :, :cut].sum(), k)
    assert (gradient[:, :, cut:] == 0).all()


@pytest.mark.parametrize("mask", [m.Window(100), m.union(m.strided_pattern(16)), MANY["bigbird"]], ids=repr)
def test_late_queries_of_a_longer_cache(mask: Mask) -> None:
    full = segment_positions([[0] * 300] * 2)
    q, k, v = alike(full, 2)
    expected = SoftmaxKernel(mask, path="naive")(KernelCall(q, k, v, full, full, NoPosition())).y[:, :, 180:]
    late = full.columns(180, 300)
    actual = SoftmaxKernel(mask, path="sparse")(KernelCall(q[:, :, 180:], k, v, late, full, NoPosition())).y
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)


LINEAR = {
    "window": m.Window(128),
    "dilated": m.Window(64, dilation=4),
    "longformer": m.symmetric_window(64) | m.GlobalTokens(m.FirstTokens(8)),
    "block diagonal": m.LocalBlocks(128),
    "bigbird": m.Causal()
    & (m.Window(128) | m.VisibleToAll(m.FirstTokens(64)) | m.RandomBlocks(64, 2, 256, past_only=True)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_work_and_memory_are_linear(name: str) -> None:
    work, largest, lengths = [], [], (4096, 16384)
    for length in lengths:
        place = segment_positions([[0] * length])
        q, k, v = (torch.zeros(1, 1, length, 8, requires_grad=True) for _ in range(3))
        kernel = SoftmaxKernel(LINEAR[name])
        assert kernel.explain(KernelCall(q, k, v, place, place, NoPosition())).startswith("sparse: ")

        def job() -> None:
            kernel(KernelCall(q, k, v, place, place, NoPosition())).y.sum().backward()  # noqa: B023

        work.append(count_flops(job))
        with LargestTensorMode() as seen:
            job()
        largest.append(seen.elements)
    slope = math.log(work[-1] / work[0]) / math.log(lengths[-1] / lengths[0])
    assert 0.9 < slope <= 1.05
    assert largest[-1] < lengths[-1] ** 2 / 50


def test_places_are_planned_once() -> None:
    place = segment_positions(ROWS["packed"])
    mask = MANY["longformer"]
    assert make_sparse_plan(mask, place, place, 2) is make_sparse_plan(mask, place, place, 2)
    again = segment_positions(ROWS["plain"])
    assert make_sparse_plan(mask, again, again, 2) is make_sparse_plan(mask, *[segment_positions(ROWS["plain"])] * 2, 2)
    marked = place._replace(roles=torch.ones_like(place.position_ids))
    roles = m.symmetric_window(9) | m.GlobalTokens(m.WithRole())
    assert make_sparse_plan(roles, marked, marked, 1) is not make_sparse_plan(roles, place, place, 1)


@pytest.mark.usefixtures("unchecked")
def test_it_says_what_it_leaves_out_and_refuses_dropout() -> None:
    place, short = segment_positions([[0] * 1024]), segment_positions([[0] * 64])
    kernel = SoftmaxKernel(m.Window(128), dropout=0.1)
    said = kernel.explain(KernelCall(*inputs(place, 2), place, place, NoPosition()))
    assert said == "sdpa: the dense mask of Window(128) for these positions, because dropout acts on the weights"
    kernel.eval()
    said = kernel.explain(KernelCall(*inputs(place, 2), place, place, NoPosition()))
    assert said.startswith("sparse: Window(128) for ")
    assert "of the cost of all pairs, in blocks of " in said
    assert kernel.explain(KernelCall(*inputs(short, 2), short, short, NoPosition())).startswith(
        "sdpa: the dense mask of Window(128)"
    )
    forced = SoftmaxKernel(m.Window(128), dropout=0.1, path="sparse")
    with pytest.raises(ValueError, match="does not form the weights that dropout acts on"):
        forced(KernelCall(*inputs(short, 2), short, short, NoPosition()))


@pytest.mark.thinned(3)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rows", ["plain", "packed"])
@pytest.mark.parametrize("name", ["window", "longformer", "roles", "image"])
def test_what_flex_attention_is_given(name: str, rows: str) -> None:
    """Its eager form, which reads the blocks and the inner mask; the fused one needs CUDA.

    Random blocks cannot be traced where shapes are checked; `test_flex_in_compiled_steps.py` has them.
    """
    mask, place = MANY[name], segment_positions(ROWS[rows])
    if name == "roles":
        place = place._replace(roles=(torch.rand(place.position_ids.shape) < 0.02).long())
    q, k, v = (x.detach() for x in alike(place, 2))
    real = (place.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    actual = flex_attention.flex_mask_attention(q, k, v, mask, place, place, scale=0.4) * real
    expected = SoftmaxKernel(mask, path="naive", scale=0.4)(KernelCall(q, k, v, place, place, NoPosition())).y * real
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    blocks = flex_attention.block_mask(mask, place, place, HEADS)
    dense = mask.dense(place, place, HEADS).expand(2, HEADS, -1, -1)
    cells = torch.nn.functional.pad(dense, [0, -LONG % 128] * 2).unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    assert (blocks.to_dense().bool() | ~cells.any(5).any(3)).all()
    assert flex_attention.block_mask(mask, place, place, HEADS) is blocks


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", MANY)
def test_block_masks_of_flex_attention(name: str, rows: str) -> None:
    """A block that is left out shows nothing, a full one everything; none but padding and ragged ends is unsure."""
    mask, place = MANY[name], segment_positions(ROWS[rows])
    if name == "roles":
        place = place._replace(roles=(torch.rand(place.position_ids.shape) < 0.02).long())
    blocks = flex_attention.block_mask(mask, place, place, HEADS)
    dense = mask.dense(place, place, HEADS).expand(2, HEADS, -1, -1)
    cells = torch.nn.functional.pad(dense, [0, -LONG % 128] * 2).unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    full = listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)
    partial = listed(blocks.kv_num_blocks, blocks.kv_indices)
    assert not (full & partial).any()
    assert (full | partial | ~cells.any(5).any(3)).all()
    # rows beyond the last query are computed by nobody
    shows_all = torch.nn.functional.pad(dense, [0, -LONG % 128], value=False)
    shows_all = torch.nn.functional.pad(shows_all, [0, 0, 0, -LONG % 128], value=True)
    assert (shows_all.unflatten(3, (-1, 128)).unflatten(2, (-1, 128)).all(5).all(3) | ~full).all()


def listed(counts: Tensor | None, indices: Tensor | None) -> Tensor:
    """The marked blocks as a boolean matrix for each row and head."""
    assert counts is not None
    assert indices is not None
    is_listed = torch.arange(indices.shape[-1]) < counts[..., None]
    marked = torch.zeros(indices.shape, dtype=torch.bool).scatter(-1, indices.long(), is_listed)
    return marked.expand(2, HEADS, -1, -1)


def test_block_masks_of_packed_causal_rows_are_exact() -> None:
    """Only blocks with a visible pair are computed, although positions begin again in each document."""
    place = segment_positions([[0] * 300 + [1] * 100 + [2] * 624, [0] * 50 + [1] * 900 + [PADDING_SEGMENT] * 74])
    blocks = flex_attention.block_mask(m.Causal(), place, place, HEADS)
    cells = m.Causal().dense(place, place, 1).unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    assert (blocks.to_dense().bool() == cells.any(5).any(3)).all()
    assert (listed(blocks.full_kv_num_blocks, blocks.full_kv_indices)[:, :1] == cells.all(5).all(3)).all()


@pytest.mark.parametrize("rows", ["plain", "packed"])
@pytest.mark.parametrize("name", MANY)
def test_block_masks_are_made_without_a_read_by_the_host(name: str, rows: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, place = MANY[name], segment_positions(ROWS[rows])._replace(layout=None)
    # what is kept for each device, before
    readable = segment_positions(ROWS[rows])
    expected = flex_attention.block_mask(mask, readable, readable, HEADS)
    monkeypatch.setattr("manyformer.nn.masks.random_blocks.is_readable", lambda x: False)
    with StaticOperatorsOnly():
        blocks = flex_attention.block_mask(mask, place, place, HEADS)
        mask_mod = blocks.mask_mod
        pairs = torch.arange(LONG)
        visible = mask_mod(pairs * 0, pairs % HEADS, pairs, pairs.flip(0))
    assert torch.equal(visible, expected.mask_mod(pairs * 0, pairs % HEADS, pairs, pairs.flip(0)))
    assert (blocks.to_dense() >= expected.to_dense()).all(), "a block with a visible pair is left out"
