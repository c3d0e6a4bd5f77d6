"""What a mask shows and nothing else: bounds are never wrong, every plan is dense attention, gradients too."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyformer import masks as m
from manyformer.bench import Largest
from manyformer.core import PADDING, Place
from manyformer.flops import count_flops
from manyformer.kernels import Softmax
from manyformer.masks import And, Heads, Mask, Not, Or
from manyformer.masks.base import pick
from manyformer.ops import flex_mask, sparse, tile_calls
from manyformer.ops.cover import arrange, cover, span_of
from manyformer.ops.plan import plan
from manyformer.position import NoPosition
from test_softmax import HEADS, inputs, place_of, run

tokens = st.one_of(
    st.builds(m.First, st.integers(0, 20)),
    st.builds(m.Positions, st.integers(0, 40), st.integers(0, 40)),
    st.builds(lambda p, b, n: m.Columns(p, b % p, min(b % p + n, p)), *[st.integers(1, 9)] * 3),
    st.builds(m.Role, st.integers(0, 2)),
)
tokens = st.one_of(tokens, st.builds(lambda a, b: a | b, tokens, tokens))

leaves: st.SearchStrategy[Mask] = st.one_of(
    st.sampled_from([m.Everything(), m.Nothing(), m.Causal(), m.Document(), m.Part()]),
    st.builds(m.Window, st.integers(1, 30), st.integers(0, 20), st.integers(1, 3)),
    st.builds(m.Stride, st.integers(1, 9)),
    st.builds(m.Blocks, st.integers(1, 20), st.integers(0, 9), st.integers(0, 9)),
    st.builds(lambda order: m.Permuted(7, *order), st.permutations(range(4))),
    st.builds(lambda w, r, a, b: m.Local2D(2 * w, r, w, a, b), *[st.integers(1, 4)] * 4),
    st.builds(m.RandomBlocks, st.integers(1, 8), st.integers(0, 3), st.integers(1, 9), st.integers(0, 3)),
    st.builds(m.RandomBlocks, st.just(5), st.just(2), st.just(8), past=st.just(True)),
    st.builds(m.To, tokens),
    st.builds(m.By, tokens),
    st.builds(m.Global, tokens),
)


def _larger(masks: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    return st.one_of(
        st.builds(And, masks, masks),
        st.builds(Or, masks, masks),
        st.builds(Not, masks),
        st.builds(lambda a, b: Heads({1: a}, rest=b), masks, masks),
    )


expressions = st.recursive(leaves, _larger, max_leaves=5)


APART = ((torch.float32, 1e-5), (torch.float64, 1e-10))
"""How near sparse attention must be to dense attention, by type."""


@st.composite
def places(draw: st.DrawFn, most: int = 40) -> Place:
    """Rows as they come: whole, padded, packed, with documents in pieces; with and without roles and parts."""
    length = draw(st.integers(1, most))
    kind = draw(st.sampled_from(["plain", "right", "any"]))
    if kind == "plain":
        rows = [[0] * length] * 2
    elif kind == "right":
        ends = [draw(st.integers(0, length)) for _ in range(2)]
        rows = [[0] * end + [PADDING] * (length - end) for end in ends]
    else:
        numbers = st.lists(st.integers(PADDING, 2), min_size=length, max_size=length)
        rows = [sorted(draw(numbers)), draw(numbers)]
    place = place_of(rows)
    if draw(st.booleans()):
        place = place._replace(role=torch.randint(0, 3, place.pos.shape))
    return place._replace(part=place.pos // 5 - draw(st.integers(0, 1))) if draw(st.booleans()) else place


@given(expressions, places(), places(), st.integers(1, 9), st.sampled_from([None, 2, 3]))
@settings(max_examples=150, deadline=None)
def test_bounds_are_never_wrong(mask: Mask, at: Place, of: Place, size: int, period: int | None) -> None:
    """`may` of a pair of blocks is true where anything is visible, `must` only where everything is."""
    mask = mask.head(1)
    assert not mask.per_head
    row, column = pick(at, 0), pick(of, 1 % of.pos.shape[0])
    q, k = arrange(row, None, period, size), arrange(column, None, None, size)
    spans = [span_of(place, order.blocks, mask.periods) for place, order in ((row, q), (column, k))]
    dense = mask(torch.tensor(0), pick(row, (slice(None), None)), pick(column, (None, slice(None))))
    dense = dense.expand(len(row.pos), len(column.pos))
    blocks = dense[q.blocks][:, :, k.blocks].transpose(1, 2)
    bounds = mask.bounds(spans[0].at((slice(None), None)), spans[1].at(None))
    assert (bounds.may | ~blocks.flatten(2).any(-1)).all()
    assert (~bounds.must | blocks.flatten(2).all(-1)).all()
    found = cover(mask, *spans)
    pairs = set(zip(found.rows.tolist(), found.columns.tolist()))
    assert pairs == {tuple(pair) for pair in bounds.may.expand(len(q.blocks), len(k.blocks)).nonzero().tolist()}


@given(expressions, places())
@settings(max_examples=120, deadline=None)
def test_terms_and_heads_are_the_mask(mask: Mask, place: Place) -> None:
    dense = mask.dense(place, place, HEADS).expand(-1, HEADS, -1, -1)
    for head in range(HEADS):
        one = mask.head(head)
        assert (one.dense(place, place, 1)[:, 0] == dense[:, head]).all()
        union = m.union([m.Nothing(), *one.terms()])
        assert (union.dense(place, place, 1)[:, 0] == dense[:, head]).all()


@given(expressions, places(), st.sampled_from([1, 2, 4]), st.integers(2, 16), st.sampled_from(APART))
@settings(max_examples=80, deadline=None)
def test_any_expression_is_dense_attention(
    mask: Mask, place: Place, groups: int, size: int, apart: tuple[torch.dtype, float]
) -> None:
    """Outputs and gradients, heads alike or not; small blocks, so that rows of a few tokens have many of them."""
    qkv = inputs(place, groups) if size % 2 else alike(place, groups)
    qkv = tuple(x.detach().to(apart[0]).requires_grad_() for x in qkv)  # type: ignore[assignment]
    real = (place.seg != PADDING)[:, None, :, None]
    up = torch.randn(*qkv[0].shape[:3], qkv[2].shape[-1], dtype=apart[0]) * real
    with pytest.MonkeyPatch.context() as patch:
        small_blocks(patch, size)
        found, *gradients = run(Softmax(mask, path="sparse"), qkv, up, place, place)
    wanted, *expected = run(Softmax(mask, path="naive"), qkv, up, place, place)
    assert_near((found * real, *gradients), (wanted * real, *expected), apart[1])


def small_blocks(patch: pytest.MonkeyPatch, size: int) -> None:
    from manyformer.ops import plan as plans
    from manyformer.ops import sketch

    patch.setattr(plans, "BLOCK", size)
    patch.setattr(sketch, "RATES", {size: 1.0, 2 * size: 1.0})
    patch.setattr(sketch, "CALL", 0)
    patch.setattr(sketch, "GATHER", 0)
    plans._spelled.cache_clear()


def alike(place: Place, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values as wide as keys, which is what torch's kernel takes."""
    q, k, _ = inputs(place, groups)
    return q, k, torch.randn_like(k, requires_grad=True)


def assert_near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...], apart: float) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=apart, rtol=apart)


LONG = 397
MANY = {
    "window": m.Window(50),
    "window in float heads": Heads({0: m.Window(33), 1: m.Window(9, dilation=4)}, rest=m.around(20)),
    "strided": m.union(m.strided(20)),
    "fixed": m.union(m.fixed(32, 4)),
    "longformer": m.around(30) | m.Global(m.Positions(0, 77, 300)),
    "roles": m.around(30) | m.Global(m.Role(1)),
    "bigbird": m.Causal() & (m.Window(40) | m.To(m.First(16)) | m.RandomBlocks(16, 3, 25, past=True)),
    "etc": m.pieces(m.First(12), l2l=m.around(25), g2g=m.Causal()),
    "image": m.Local2D(20, 4, 5, 4, 5),
    "blocks": Heads({0: m.Permuted(100, 1, 2, 3, 0)}, rest=m.Blocks(100)),
    "almost all": ~m.Window(30),
}
ROWS = {
    "plain": [[0] * LONG] * 2,
    "right padding": [[0] * LONG, [0] * 200 + [PADDING] * (LONG - 200)],
    "left padding": [[0] * LONG, [PADDING] * 150 + [0] * (LONG - 150)],
    "packed": [[0] * 101 + [1] * (LONG - 101), [0] * 20 + [1] * 300 + [PADDING] * (LONG - 320)],
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", MANY)
def test_patterns_are_dense_attention(name: str, rows: str) -> None:
    """At an odd length, in both precisions."""
    mask, place = MANY[name], place_of(ROWS[rows])
    if name == "roles":
        place = place._replace(role=(torch.rand(place.pos.shape) < 0.02).long())
    real = (place.seg != PADDING)[:, None, :, None]
    wide = alike(place, 2)
    for dtype, apart in APART:
        qkv = tuple(x.detach().to(dtype).requires_grad_() for x in wide)
        up = torch.randn(*qkv[0].shape[:3], qkv[2].shape[-1], dtype=dtype) * real
        found, *gradients = run(Softmax(mask, path="sparse"), qkv, up, place, place)
        wanted, *expected = run(Softmax(mask, path="naive"), qkv, up, place, place)
        assert_near((found * real, *gradients), (wanted * real, *expected), apart)


@pytest.mark.parametrize(("kept", "held"), [(True, True), (True, False), (False, False)])
def test_kept_or_made_anew(kept: bool, held: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights and gathered keys that are kept for the gradient and without, a few scores at a time."""
    monkeypatch.setattr(sparse, "KEPT", sparse.KEPT if kept else 0)
    monkeypatch.setattr(sparse, "HELD", sparse.HELD if held else 0)
    monkeypatch.setattr(tile_calls, "CACHED", 1 << 13)
    place = place_of(ROWS["packed"])
    q, k, v = alike(place, 2)
    real = (place.seg != PADDING)[:, None, :, None]
    up = torch.randn_like(q) * real
    for mask in (MANY["longformer"], MANY["strided"], m.Window(40) & ~m.Window(3), m.RandomBlocks(100, 2, 4)):
        found, *gradients = run(Softmax(mask, path="sparse"), (q, k, v), up, place, place)
        wanted, *expected = run(Softmax(mask, path="naive"), (q, k, v), up, place, place)
        assert_near((found * real, *gradients), (wanted * real, *expected), 1e-10)


@pytest.mark.parametrize("name", ["window", "strided", "bigbird", "window in float heads"])
def test_heads_side_by_side(name: str) -> None:
    """As projections leave them: channels of one head are neighbours, tokens of one head are not."""
    place = place_of(ROWS["plain"])
    wide = [torch.randn(2, LONG, 4, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    up = torch.randn(2, 4, LONG, 6, dtype=torch.float64)
    found = []
    for path in ("sparse", "naive"):
        y = Softmax(MANY[name], path=path)(*(x.transpose(1, 2) for x in wide), place, place, NoPosition()).y
        found.append((y, *torch.autograd.grad(y, wide, up)))
    assert_near(*found, 1e-10)


@pytest.mark.usefixtures("unchecked")
def test_rows_that_see_a_block_less_share_a_call() -> None:
    """BigBird's second row and last but one see a global block among their neighbours."""
    place, ends = place_of([[0] * 1152]), m.Positions(*range(64), *range(1088, 1152))
    mask = m.Blocks(64, before=64, after=64) | m.Global(ends) | m.RandomBlocks(64, 3, 18, lead=1, tail=1)
    shared, *single = plan(mask, place, place, HEADS).rows[0]
    assert shared.heads == tuple(range(HEADS))
    assert [lane.heads for lane in single] == [(head,) for head in range(HEADS)]
    for lane in single:
        ((tiles,),) = (part.tiles for part in lane.parts)
        assert tiles.beside
        assert tiles.rows.tolist() == list(range(1, 17))
        assert tiles.short == ((0, 7), (15, 7))
    assert all(part.alone for lane in (shared, *single) for part in lane.parts)
    qkv = inputs(place, HEADS)
    up = torch.randn(1, HEADS, 1152, qkv[2].shape[-1], dtype=torch.float64)
    found = [run(Softmax(mask, path=path), qkv, up, place, place) for path in ("sparse", "blocked", "naive")]  # type: ignore[arg-type]
    assert_near(tuple(found[0]), tuple(found[2]), 1e-10)
    assert_near(tuple(found[1]), tuple(found[2]), 1e-10)


def test_gradients_by_differences() -> None:
    place = place_of([[0] * 9])
    q, k, v = (torch.randn(1, 2, 9, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kernel = Softmax(m.Window(4) | m.To(m.First(1)), path="sparse")
    assert torch.autograd.gradcheck(lambda *qkv: kernel(*qkv, place, place, NoPosition()).y, (q, k, v))


@pytest.mark.parametrize("name", ["window", "strided", "fixed", "bigbird", "image"])
def test_nothing_leaks_from_the_future(name: str) -> None:
    """Not even through what merging computes with: the numbers of the future may be anything finite."""
    mask = m.Causal() & MANY[name]
    place = place_of(ROWS["plain"])
    q, k, v = (x.detach().float() for x in alike(place, 2))
    kernel, cut = Softmax(mask, path="sparse"), 211
    before = kernel(q, k, v, place, place, NoPosition()).y[:, :, :cut]
    for x in (q, k, v):
        x[:, :, cut:] = 50 * torch.randn_like(x[:, :, cut:])
    assert (kernel(q, k, v, place, place, NoPosition()).y[:, :, :cut] == before).all()
    k.requires_grad_()
    (gradient,) = torch.autograd.grad(kernel(q, k, v, place, place, NoPosition()).y[:, :, :cut].sum(), k)
    assert (gradient[:, :, cut:] == 0).all()


@pytest.mark.parametrize("mask", [m.Window(100), m.union(m.strided(16)), MANY["bigbird"]], ids=repr)
def test_late_queries_of_a_longer_cache(mask: Mask) -> None:
    whole = place_of([[0] * 300] * 2)
    q, k, v = alike(whole, 2)
    wanted = Softmax(mask, path="naive")(q, k, v, whole, whole, NoPosition()).y[:, :, 180:]
    late = whole.columns(180, 300)
    found = Softmax(mask, path="sparse")(q[:, :, 180:], k, v, late, whole, NoPosition()).y
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


LINEAR = {
    "window": m.Window(128),
    "dilated": m.Window(64, dilation=4),
    "longformer": m.around(64) | m.Global(m.First(8)),
    "block diagonal": m.Blocks(128),
    "bigbird": m.Causal() & (m.Window(128) | m.To(m.First(64)) | m.RandomBlocks(64, 2, 256, past=True)),
}


@pytest.mark.parametrize("name", LINEAR)
def test_work_and_memory_are_linear(name: str) -> None:
    work, largest, lengths = [], [], (4096, 16384)
    for length in lengths:
        place = place_of([[0] * length])
        q, k, v = (torch.zeros(1, 1, length, 8, requires_grad=True) for _ in range(3))
        kernel = Softmax(LINEAR[name])
        assert kernel.explain(q, k, v, place, place, NoPosition()).startswith("sparse: ")

        def job() -> None:
            kernel(q, k, v, place, place, NoPosition()).y.sum().backward()  # noqa: B023

        work.append(count_flops(job))
        with Largest() as seen:
            job()
        largest.append(seen.elements)
    slope = math.log(work[-1] / work[0]) / math.log(lengths[-1] / lengths[0])
    assert 0.9 < slope <= 1.05
    assert largest[-1] < lengths[-1] ** 2 / 50


def test_places_are_planned_once() -> None:
    place = place_of(ROWS["packed"])
    mask = MANY["longformer"]
    assert plan(mask, place, place, 2) is plan(mask, place, place, 2)
    again = place_of(ROWS["plain"])
    assert plan(mask, again, again, 2) is plan(mask, *[place_of(ROWS["plain"])] * 2, 2)
    marked = place._replace(role=torch.ones_like(place.pos))
    roles = m.around(9) | m.Global(m.Role())
    assert plan(roles, marked, marked, 1) is not plan(roles, place, place, 1)


@pytest.mark.usefixtures("unchecked")
def test_it_says_what_it_leaves_out_and_refuses_dropout() -> None:
    place, short = place_of([[0] * 1024]), place_of([[0] * 64])
    kernel = Softmax(m.Window(128), dropout=0.1)
    said = kernel.explain(*inputs(place, 2), place, place, NoPosition())
    assert said == "sdpa: the mask Window(128) written out for these places, because dropout acts on the weights"
    kernel.eval()
    said = kernel.explain(*inputs(place, 2), place, place, NoPosition())
    assert said.startswith("sparse: Window(128) for ")
    assert "of the cost of all pairs, in blocks of " in said
    assert kernel.explain(*inputs(short, 2), short, short, NoPosition()).startswith("sdpa: the mask Window(128)")
    forced = Softmax(m.Window(128), dropout=0.1, path="sparse")
    with pytest.raises(ValueError, match="never forms the weights that dropout is to act on"):
        forced(*inputs(short, 2), short, short, NoPosition())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("rows", ["plain", "packed"])
@pytest.mark.parametrize("name", ["window", "longformer", "roles", "bigbird", "image"])
def test_what_flex_attention_is_given(name: str, rows: str) -> None:
    """Its eager form, which reads the blocks and the inner mask; the fused one needs CUDA."""
    mask, place = MANY[name], place_of(ROWS[rows])
    if name == "roles":
        place = place._replace(role=(torch.rand(place.pos.shape) < 0.02).long())
    q, k, v = (x.detach() for x in alike(place, 2))
    real = (place.seg != PADDING)[:, None, :, None]
    found = flex_mask.attend(q, k, v, mask, place, place, scale=0.4) * real
    wanted = Softmax(mask, path="naive", scale=0.4)(q, k, v, place, place, NoPosition()).y * real
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)
    blocks = flex_mask.block_mask(mask, place, place, HEADS)
    dense = mask.dense(place, place, HEADS).expand(2, HEADS, -1, -1)
    cells = torch.nn.functional.pad(dense, [0, -LONG % 128] * 2).unflatten(3, (-1, 128)).unflatten(2, (-1, 128))
    assert (blocks.to_dense().bool() | ~cells.any(5).any(3)).all()
    assert flex_mask.block_mask(mask, place, place, HEADS) is blocks
