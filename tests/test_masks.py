"""Masks: an algebra of predicates, checked against its own meaning in plain Python."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyformer.core import PADDING, Place
from manyformer.masks import And, Causal, Document, Everything, Heads, Mask, Not, Nothing, Or

HEADS = 3

simple = st.sampled_from([Everything(), Nothing(), Causal(), Document()])


def _larger(masks: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    return st.one_of(
        st.builds(And, masks, masks),
        st.builds(Or, masks, masks),
        st.builds(Not, masks),
        st.builds(lambda m, r: Heads(m, rest=r), st.dictionaries(st.integers(0, HEADS - 1), masks, max_size=2), masks),
    )


masks: st.SearchStrategy[Mask] = st.recursive(simple, _larger, max_leaves=6)


@st.composite
def places(draw: st.DrawFn) -> Place:
    """Any positions and segments: a mask must not care where they come from."""
    length = draw(st.integers(1, 5))
    rows = st.lists(st.lists(st.integers(-1, 4), min_size=length, max_size=length), min_size=2, max_size=2)
    return Place(torch.tensor(draw(rows)), torch.tensor(draw(rows)).clamp(max=1))


def means(mask: Mask, h: int, q: tuple[int, int], k: tuple[int, int]) -> bool:
    """What the mask says about one pair, (position, segment) each, spelled out."""
    match mask:
        case Everything():
            return True
        case Nothing():
            return False
        case Causal():
            return k[0] <= q[0]
        case Document():
            return k[1] == q[1]
        case And(a, b):
            return means(a, h, q, k) and means(b, h, q, k)
        case Or(a, b):
            return means(a, h, q, k) or means(b, h, q, k)
        case Not(a):
            return not means(a, h, q, k)
        case Heads():
            return means(dict(mask.masks).get(h, mask.rest), h, q, k)
    raise AssertionError(mask)


def dense(mask: Mask, at: Place, of: Place) -> Tensor:
    return mask.dense(at, of, HEADS).expand(at.pos.shape[0], HEADS, at.pos.shape[1], of.pos.shape[1])


def slow(mask: Mask, at: Place, of: Place) -> Tensor:
    """The same by four loops, own segments only."""

    def row(b: int, h: int, i: int) -> list[bool]:
        q = (int(at.pos[b, i]), int(at.seg[b, i]))
        keys = [(int(p), int(s)) for p, s in zip(of.pos[b], of.seg[b])]
        return [means(mask, h, q, k) and k[1] == q[1] and k[1] != PADDING for k in keys]

    return torch.tensor(
        [[[row(b, h, i) for i in range(at.pos.shape[1])] for h in range(HEADS)] for b in range(at.pos.shape[0])]
    )


@given(masks, places(), places())
@settings(max_examples=150, deadline=None)
def test_dense_is_the_meaning_written_out(mask: Mask, at: Place, of: Place) -> None:
    assert (dense(mask, at, of) == slow(mask, at, of)).all()


@given(masks, masks, masks, places())
@settings(max_examples=100, deadline=None)
def test_laws(a: Mask, b: Mask, c: Mask, place: Place) -> None:
    def same(left: Mask, right: Mask) -> bool:
        return bool((dense(left, place, place) == dense(right, place, place)).all())

    assert same(a & b, b & a)
    assert same(a | b, b | a)
    assert same((a & b) & c, a & (b & c))
    assert same((a | b) | c, a | (b | c))
    assert same(a & (b | c), (a & b) | (a & c))
    assert same(~(a & b), ~a | ~b)
    assert same(~~a, a)
    assert same(a & Everything(), a)
    assert same(a | Nothing(), a)
    assert same(a & ~a, Nothing())


@given(masks, places(), places())
@settings(max_examples=100, deadline=None)
def test_what_it_prints_means_the_same(mask: Mask, at: Place, of: Place) -> None:
    read = eval(repr(mask))
    assert repr(read) == repr(mask)
    assert (dense(read, at, of) == dense(mask, at, of)).all()


@given(masks, masks)
@settings(max_examples=100, deadline=None)
def test_values_compare_by_content(a: Mask, b: Mask) -> None:
    assert (a & b) == And(a, b)
    assert hash(a & b) == hash(And(a, b))
    assert Heads({1: a, 0: b}) == Heads({0: b, 1: a}, rest=Nothing())
    if a != b:
        assert (a & b) != (b & a)
        assert Heads({0: a}) != Heads({0: b})


@given(masks, places(), places())
@settings(max_examples=150, deadline=None)
def test_claims_are_kept(mask: Mask, at: Place, of: Place) -> None:
    """`causal` and `per_head` may say less than is true, never more."""
    seen = dense(mask, at, of)
    if mask.causal:
        later = of.pos[:, None, None, :] > at.pos[:, None, :, None]
        assert not (seen & later).any()
    if not mask.per_head:
        assert mask.dense(at, of, HEADS).shape[1] == 1
        assert (seen == seen[:, :1]).all()


def test_causal_is_known_where_it_matters() -> None:
    assert (Causal() & Document()).causal
    assert (Document() & (Causal() | Nothing())).causal
    assert Heads({0: Causal()}, rest=Nothing()).causal
    for mask in (Everything(), ~Causal(), Causal() | Everything(), Heads({0: Causal()}, rest=Everything())):
        assert not mask.causal


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Causal() & (Document() | ~Nothing()), "Causal() & (Document() | ~Nothing())"),
        (~(Causal() & Document()), "~(Causal() & Document())"),
        (Heads({1: Causal()}), "Heads({1: Causal()}, rest=Nothing())"),
    ],
)
def test_repr(mask: Mask, text: str) -> None:
    assert repr(mask) == text


def test_heads_are_numbered_from_zero() -> None:
    with pytest.raises(ValueError, match="head -1 does not exist"):
        Heads({-1: Causal()})


def test_masks_cannot_be_changed() -> None:
    mask: Any = Causal() & Document()
    with pytest.raises(AttributeError):
        mask.left = Everything()
