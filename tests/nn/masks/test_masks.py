"""Masks: an algebra of predicates, checked against its own meaning in plain Python."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyformer.nn.core import PADDING_SEGMENT, TokenPositions
from manyformer.nn.masks import AllKeys, AndMask, Causal, Mask, NoKeys, NotMask, OrMask, PerHead, SameDocument

HEADS = 3

simple = st.sampled_from([AllKeys(), NoKeys(), Causal(), SameDocument()])


def _larger(masks: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    return st.one_of(
        st.builds(AndMask, masks, masks),
        st.builds(OrMask, masks, masks),
        st.builds(NotMask, masks),
        st.builds(
            lambda m, r: PerHead(m, default=r), st.dictionaries(st.integers(0, HEADS - 1), masks, max_size=2), masks
        ),
    )


masks: st.SearchStrategy[Mask] = st.recursive(simple, _larger, max_leaves=6)


@st.composite
def places(draw: st.DrawFn) -> TokenPositions:
    """Any positions and segments: a mask must not care where they come from."""
    length = draw(st.integers(1, 5))
    rows = st.lists(st.lists(st.integers(-1, 4), min_size=length, max_size=length), min_size=2, max_size=2)
    return TokenPositions(torch.tensor(draw(rows)), torch.tensor(draw(rows)).clamp(max=1))


def means(mask: Mask, h: int, q: tuple[int, int], k: tuple[int, int]) -> bool:
    """What the mask says about one pair, (position, segment) each, spelled out."""
    match mask:
        case AllKeys():
            return True
        case NoKeys():
            return False
        case Causal():
            return k[0] <= q[0]
        case SameDocument():
            return k[1] == q[1]
        case AndMask(a, b):
            return means(a, h, q, k) and means(b, h, q, k)
        case OrMask(a, b):
            return means(a, h, q, k) or means(b, h, q, k)
        case NotMask(a):
            return not means(a, h, q, k)
        case PerHead():
            return means(dict(mask.masks).get(h, mask.default), h, q, k)
    raise AssertionError(mask)


def dense(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions) -> Tensor:
    return mask.dense(query_positions, key_positions, HEADS).expand(
        query_positions.position_ids.shape[0],
        HEADS,
        query_positions.position_ids.shape[1],
        key_positions.position_ids.shape[1],
    )


def slow(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions) -> Tensor:
    """The same by four loops, own segments only."""

    def row(b: int, h: int, i: int) -> list[bool]:
        q = (int(query_positions.position_ids[b, i]), int(query_positions.segment_ids[b, i]))
        keys = [(int(p), int(s)) for p, s in zip(key_positions.position_ids[b], key_positions.segment_ids[b])]
        return [means(mask, h, q, k) and k[1] == q[1] and k[1] != PADDING_SEGMENT for k in keys]

    return torch.tensor(
        [
            [[row(b, h, i) for i in range(query_positions.position_ids.shape[1])] for h in range(HEADS)]
            for b in range(query_positions.position_ids.shape[0])
        ]
    )


@given(masks, places(), places())
@settings(max_examples=150, deadline=None)
def test_dense_is_the_meaning_written_out(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions
) -> None:
    assert (dense(mask, query_positions, key_positions) == slow(mask, query_positions, key_positions)).all()


@given(masks, masks, masks, places())
@settings(max_examples=100, deadline=None)
def test_laws(a: Mask, b: Mask, c: Mask, positions: TokenPositions) -> None:
    def same(left: Mask, right: Mask) -> bool:
        return bool((dense(left, positions, positions) == dense(right, positions, positions)).all())

    assert same(a & b, b & a)
    assert same(a | b, b | a)
    assert same((a & b) & c, a & (b & c))
    assert same((a | b) | c, a | (b | c))
    assert same(a & (b | c), (a & b) | (a & c))
    assert same(~(a & b), ~a | ~b)
    assert same(~~a, a)
    assert same(a & AllKeys(), a)
    assert same(a | NoKeys(), a)
    assert same(a & ~a, NoKeys())


@given(masks, places(), places())
@settings(max_examples=100, deadline=None)
def test_what_it_prints_means_the_same(
    mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions
) -> None:
    read = eval(repr(mask))
    assert repr(read) == repr(mask)
    assert (dense(read, query_positions, key_positions) == dense(mask, query_positions, key_positions)).all()


@given(masks, masks)
@settings(max_examples=100, deadline=None)
def test_values_compare_by_content(a: Mask, b: Mask) -> None:
    assert (a & b) == AndMask(a, b)
    assert hash(a & b) == hash(AndMask(a, b))
    assert PerHead({1: a, 0: b}) == PerHead({0: b, 1: a}, default=NoKeys())
    if a != b:
        assert (a & b) != (b & a)
        assert PerHead({0: a}) != PerHead({0: b})


@given(masks, places(), places())
@settings(max_examples=150, deadline=None)
def test_claims_are_kept(mask: Mask, query_positions: TokenPositions, key_positions: TokenPositions) -> None:
    """`causal` and `per_head` may say less than is true, never more."""
    seen = dense(mask, query_positions, key_positions)
    if mask.causal:
        later = key_positions.position_ids[:, None, None, :] > query_positions.position_ids[:, None, :, None]
        assert not (seen & later).any()
    if not mask.per_head:
        assert mask.dense(query_positions, key_positions, HEADS).shape[1] == 1
        assert (seen == seen[:, :1]).all()


def test_causal_is_known_where_it_matters() -> None:
    assert (Causal() & SameDocument()).causal
    assert (SameDocument() & (Causal() | NoKeys())).causal
    assert PerHead({0: Causal()}, default=NoKeys()).causal
    for mask in (AllKeys(), ~Causal(), Causal() | AllKeys(), PerHead({0: Causal()}, default=AllKeys())):
        assert not mask.causal


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (Causal() & (SameDocument() | ~NoKeys()), "Causal() & (SameDocument() | ~NoKeys())"),
        (~(Causal() & SameDocument()), "~(Causal() & SameDocument())"),
        (PerHead({1: Causal()}), "PerHead({1: Causal()}, default=NoKeys())"),
    ],
)
def test_repr(mask: Mask, text: str) -> None:
    assert repr(mask) == text


def test_heads_are_numbered_from_zero() -> None:
    with pytest.raises(ValueError, match="head -1 does not exist"):
        PerHead({-1: Causal()})


def test_masks_cannot_be_changed() -> None:
    mask: Any = Causal() & SameDocument()
    with pytest.raises(AttributeError):
        mask.left = AllKeys()
