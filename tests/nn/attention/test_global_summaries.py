"""Summaries before a text: where they stand, and attention in four directions, against its own formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.attention.global_local import FourPieceAttention
from manyformer.nn.attention.global_summaries import LeadingSummaries, PartSummaries, SummaryPrefixedLayer
from manyformer.nn.core import (
    GLOBAL_ROLE,
    PADDING_SEGMENT,
    SUMMARY_ROLE,
    Chain,
    Context,
    ContiguousLayout,
    PrefixedLayout,
    TokenPositions,
)
from manyformer.nn.masks import AllKeys, GlobalTokens, Mask, SamePart, WithRole, four_piece_pattern, symmetric_window
from manyformer.nn.ops.static_layout import materialize
from manyformer.nn.positions import RelativeLabelPosition
from perturbing import perturb
from token_rows import segment_positions

DIM, HEADS, LENGTH, STRETCH, CLIP, WINDOW = 8, 2, 11, 4, 2, 3


def body(kinds: PartSummaries | LeadingSummaries) -> SummaryPrefixedLayer:
    return SummaryPrefixedLayer(Chain(), DIM, kinds)


def test_a_whole_document_and_its_summaries() -> None:
    place = body(PartSummaries(STRETCH)).prefixed_positions(segment_positions([[0] * LENGTH] * 2), 2)
    assert place.layout == PrefixedLayout(3, ContiguousLayout(), STRETCH)
    assert place.position_ids.tolist() == [[0, 1, 2, *range(LENGTH)]] * 2
    assert place.roles is not None
    assert place.roles.tolist() == [[SUMMARY_ROLE] * 3 + [0] * LENGTH] * 2
    assert place.part_ids is not None
    assert place.part_ids.tolist() == [[0, 1, 2, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]] * 2
    # what the layout spells out is what the numbers are
    spelled = materialize(place.layout, LENGTH + 3)
    for name in ("position_ids", "segment_ids", "roles", "part_ids"):
        assert (getattr(spelled, name) == getattr(place, name)).all()


def test_packed_rows_and_parts_of_their_own() -> None:
    text = segment_positions([[3] * 5 + [7] * 6, [PADDING_SEGMENT] * 9 + [0] * 2])
    place = body(PartSummaries(STRETCH)).prefixed_positions(text, 2)
    assert place.layout == PrefixedLayout(4)
    assert place.segment_ids[:, :4].tolist() == [[3, 3, 7, 7], [0, PADDING_SEGMENT, PADDING_SEGMENT, PADDING_SEGMENT]]
    assert place.position_ids[0, :4].tolist() == [0, 1, 0, 1]
    parts = torch.tensor([[0, 0, 1, -1, 2, 0, 0, 0, 0, 0, 0], [-1] * 9 + [5, 5]])
    place = body(PartSummaries(STRETCH)).prefixed_positions(text._replace(part_ids=parts), 2)
    assert place.segment_ids[:, :4].tolist() == [[3, 3, 3, 7], [0, PADDING_SEGMENT, PADDING_SEGMENT, PADDING_SEGMENT]]
    assert place.part_ids is not None
    assert place.part_ids[:, :4].tolist() == [[0, 1, 2, 0], [5, -1, -1, -1]]
    leading = body(LeadingSummaries(2)).prefixed_positions(text, 2)
    assert leading.segment_ids[:, :4].tolist() == [[3, 3, 7, 7], [0, 0, PADDING_SEGMENT, PADDING_SEGMENT]]
    assert leading.position_ids[0, :4].tolist() == [0, 1, 0, 1]
    assert leading.part_ids is not None
    assert (leading.part_ids == -1).all()
    assert body(LeadingSummaries(2)).prefixed_positions(segment_positions([[0] * 4]), 1).layout == PrefixedLayout(
        2, ContiguousLayout()
    )


def label(query_positions: TokenPositions, key_positions: TokenPositions, i: int, j: int) -> int:
    """Ainslie et al. 2020: a clipped distance, or whether a summary and a token belong together."""
    assert query_positions.roles is not None
    assert query_positions.part_ids is not None
    if (query_positions.roles[0, i] == SUMMARY_ROLE) == (key_positions.roles[0, j] == SUMMARY_ROLE):  # type: ignore[index]
        return int((key_positions.position_ids[0, j] - query_positions.position_ids[0, i]).clamp(-CLIP, CLIP)) + CLIP
    return 2 * CLIP + 1 + int(query_positions.part_ids[0, i] != key_positions.part_ids[0, j])  # type: ignore[index]


def sees(positions: TokenPositions, i: int, j: int, reads: Mask) -> bool:
    assert positions.roles is not None
    assert positions.part_ids is not None
    ours, other = (positions.roles[0, n] == SUMMARY_ROLE for n in (i, j))
    if ours and not other:
        return reads == AllKeys() or bool(positions.part_ids[0, i] == positions.part_ids[0, j])
    return bool(other) or bool((positions.position_ids[0, i] - positions.position_ids[0, j]).abs() <= WINDOW)


def by_hand(positions: TokenPositions, q: Tensor, k: Any, v: Any, labels: Any, reads: Mask) -> Tensor:
    """One pair at a time; keys, values and labels by pair."""
    n, width = positions.position_ids.shape[1], DIM // HEADS
    y = torch.zeros(HEADS, n, width, dtype=q.dtype)
    for h in range(HEADS):
        for i in range(n):
            seen = [j for j in range(n) if sees(positions, i, j, reads)]
            rows = [label(positions, positions, i, j) for j in seen]
            table = labels(i)
            scores = [
                (q[h, i] @ (k(i, j)[h] + table.keys[h, r]) + table.bias[h, r]) / width**0.5 for j, r in zip(seen, rows)
            ]
            weights = torch.stack(scores).softmax(0)
            y[h, i] = sum(w * v(i, j)[h] for w, j in zip(weights, seen))  # type: ignore[assignment]
    return y.transpose(0, 1).flatten(1)


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).movedim(-2, 0)


def shaken(layer: Any) -> Any:
    perturb(layer.double(), 0.3)
    return layer


@pytest.mark.parametrize("reads", [AllKeys(), SamePart()], ids=repr)
def test_shared_projections(reads: Mask) -> None:
    mask = four_piece_pattern(
        WithRole(SUMMARY_ROLE), l2l=symmetric_window(WINDOW) | GlobalTokens(WithRole(GLOBAL_ROLE)), g2l=reads
    )
    layer = shaken(
        Attention(DIM, HEADS, SoftmaxKernel(mask), position=RelativeLabelPosition(DIM // HEADS, HEADS, CLIP))
    )
    place = body(PartSummaries(STRETCH)).prefixed_positions(segment_positions([[0] * LENGTH]), 1)
    x = torch.randn(1, LENGTH + 3, DIM, dtype=torch.float64)
    k, v = (heads_of(part[0]) for part in layer.kv_proj(x).chunk(2, -1))
    y = by_hand(
        place, heads_of(layer.q_proj(x)[0]), lambda i, j: k[:, j], lambda i, j: v[:, j], lambda i: layer.position, reads
    )
    torch.testing.assert_close(layer(x, Context(place)).y[0], layer.out_proj(y), atol=1e-12, rtol=0)


@pytest.mark.parametrize("reads", [AllKeys(), SamePart()], ids=repr)
def test_each_piece_with_keys_and_values_of_its_own(reads: Mask) -> None:
    l2l = symmetric_window(WINDOW) | GlobalTokens(WithRole(GLOBAL_ROLE))
    layer = shaken(
        FourPieceAttention(
            DIM, HEADS, g2l=reads, l2l=l2l, position=lambda: RelativeLabelPosition(DIM // HEADS, HEADS, CLIP)
        )
    )
    place = body(PartSummaries(STRETCH)).prefixed_positions(segment_positions([[0] * LENGTH]), 1)
    x = torch.randn(1, LENGTH + 3, DIM, dtype=torch.float64)

    def side(i: int) -> Any:
        return layer.summaries if i < 3 else layer.text

    def pair(i: int, j: int, which: int) -> Tensor:
        project = side(i).summary_kv_proj if j < 3 else side(i).text_kv_proj
        return heads_of(project(x[0]).chunk(2, -1)[which])[:, j]

    q = heads_of(torch.cat([layer.summaries.q_proj(x[0, :3]), layer.text.q_proj(x[0, 3:])]))
    y = by_hand(place, q, lambda i, j: pair(i, j, 0), lambda i, j: pair(i, j, 1), lambda i: side(i).position, reads)
    expected = torch.cat([layer.summaries.out_proj(y[:3]), layer.text.out_proj(y[3:])])
    torch.testing.assert_close(layer(x, Context(place)).y[0], expected, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="wrap it in a SummaryPrefixedLayer"):
        layer(x, Context(place._replace(layout=None)))


def test_a_wide_window_without_labels_is_ordinary_attention() -> None:
    """Ainslie et al. 2020: the four pieces then are one."""
    mask = four_piece_pattern(WithRole(SUMMARY_ROLE), l2l=symmetric_window(LENGTH))
    layer, plain = (Attention(DIM, HEADS, SoftmaxKernel(kind)).double() for kind in (mask, AllKeys()))
    plain.load_state_dict(layer.state_dict())
    place = body(PartSummaries(STRETCH)).prefixed_positions(segment_positions([[0] * LENGTH]), 1)
    x = torch.randn(1, LENGTH + 3, DIM, dtype=torch.float64)
    torch.testing.assert_close(layer(x, Context(place)).y, plain(x, Context(place)).y, atol=1e-12, rtol=0)


SMALL = {"vocab": 23, "dim": 16, "heads": 2, "ff_dim": 24, "dropout": 0.0}
BIGBIRD = {"block": 4, "max_length": 64, "random": 1, "summaries": 2}


@pytest.mark.parametrize(
    ("name", "words"),
    [("etc", {}), ("etc", {"projections": "separate", "summary_reads": "part"}), ("bigbird-etc", BIGBIRD)],
    ids=["shared", "separate", "bigbird"],
)
def test_long_texts_in_blocks_and_short_ones_written_out_are_the_same(name: str, words: dict[str, Any]) -> None:
    """A plan made from the layout, one made from the numbers, and none."""
    window = {} if name == "bigbird-etc" else {"window": 5, "part_length": 16}
    model = shaken(mf.build(name, **SMALL, depth=1, **window, **words)).eval()
    tokens = torch.randint(5, 23, (1, 203))
    numbers = torch.zeros(1, 206, dtype=torch.long)
    numbers[:, 203:] = PADDING_SEGMENT
    longer = torch.cat([tokens, tokens[:, :3]], 1)
    kernels = [part for part in model.modules() if isinstance(part, SoftmaxKernel)]
    with torch.no_grad():
        full, padded = model(tokens).logits, model(longer, numbers).logits[:, :203]
        for kernel in kernels:
            kernel.path = "naive"
        torch.testing.assert_close(full, model(tokens).logits, atol=1e-10, rtol=0)
        torch.testing.assert_close(full, padded, atol=1e-10, rtol=0)
    said = mf.explain(model.float(), tokens)
    assert said
    assert kernels


def test_any_two_tokens_are_two_steps_apart() -> None:
    """Through a summary; without one a window leads no further than its layers reach."""
    for depth, leads in ((1, False), (2, True)):
        model = shaken(mf.build("etc", **SMALL, depth=depth, window=2, part_length=4)).eval()
        vectors = torch.randn(1, 40, 16, dtype=torch.float64, requires_grad=True)
        place = positions_of(torch.zeros(1, 40, dtype=torch.long), None, None)[0]
        y = model.body(vectors, Context(place)).y
        (gradient,) = torch.autograd.grad(y[0, 0].sum(), vectors)
        assert bool((gradient[0, -1] != 0).any()) == leads


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="part_length \\(0\\) must be at least 1"):
        PartSummaries(0)
    with pytest.raises(ValueError, match="count \\(0\\) must be at least 1"):
        LeadingSummaries(0)
    with pytest.raises(ValueError, match="clip \\(0\\)"):
        RelativeLabelPosition(4, 2, 0)
    with pytest.raises(ValueError, match="cannot continue from a state"):
        body(LeadingSummaries(1))(torch.zeros(1, 2, DIM), Context(segment_positions([[0, 0]])), [()])
