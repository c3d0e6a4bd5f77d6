"""Summaries before a text: where they stand, and attention in four directions, against its own formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.attention import Attention
from manyformer.core import GLOBAL, PADDING, SUMMARY, Chain, Context, Fronted, Place, Plain
from manyformer.kernels import Softmax
from manyformer.masks import Everything, Global, Mask, Part, Role, around, pieces
from manyformer.mixers.global_local import FourPieces
from manyformer.mixers.summaries import EachPart, Leading, Summarised
from manyformer.models.places import locate
from manyformer.ops.spelled import spell
from manyformer.position import Labels

DIM, HEADS, LENGTH, STRETCH, CLIP, WINDOW = 8, 2, 11, 4, 2, 3


def place_of(segments: list[list[int]]) -> Place:
    numbers = torch.tensor(segments)
    return locate(numbers, numbers, None)[0]


def body(kinds: EachPart | Leading) -> Summarised:
    return Summarised(Chain(), DIM, kinds)


def test_a_whole_document_and_its_summaries() -> None:
    place = body(EachPart(STRETCH)).place(place_of([[0] * LENGTH] * 2), 2)
    assert place.layout == Fronted(3, Plain(), STRETCH)
    assert place.pos.tolist() == [[0, 1, 2, *range(LENGTH)]] * 2
    assert place.role is not None
    assert place.role.tolist() == [[SUMMARY] * 3 + [0] * LENGTH] * 2
    assert place.part is not None
    assert place.part.tolist() == [[0, 1, 2, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]] * 2
    # what the layout spells out is what the numbers are
    told = spell(place.layout, LENGTH + 3)
    for name in ("pos", "seg", "role", "part"):
        assert (getattr(told, name) == getattr(place, name)).all()


def test_packed_rows_and_parts_of_their_own() -> None:
    text = place_of([[3] * 5 + [7] * 6, [PADDING] * 9 + [0] * 2])
    place = body(EachPart(STRETCH)).place(text, 2)
    assert place.layout == Fronted(4)
    assert place.seg[:, :4].tolist() == [[3, 3, 7, 7], [0, PADDING, PADDING, PADDING]]
    assert place.pos[0, :4].tolist() == [0, 1, 0, 1]
    parts = torch.tensor([[0, 0, 1, -1, 2, 0, 0, 0, 0, 0, 0], [-1] * 9 + [5, 5]])
    place = body(EachPart(STRETCH)).place(text._replace(part=parts), 2)
    assert place.seg[:, :4].tolist() == [[3, 3, 3, 7], [0, PADDING, PADDING, PADDING]]
    assert place.part is not None
    assert place.part[:, :4].tolist() == [[0, 1, 2, 0], [5, -1, -1, -1]]
    leading = body(Leading(2)).place(text, 2)
    assert leading.seg[:, :4].tolist() == [[3, 3, 7, 7], [0, 0, PADDING, PADDING]]
    assert leading.pos[0, :4].tolist() == [0, 1, 0, 1]
    assert leading.part is not None
    assert (leading.part == -1).all()
    assert body(Leading(2)).place(place_of([[0] * 4]), 1).layout == Fronted(2, Plain())


def label(at: Place, of: Place, i: int, j: int) -> int:
    """Ainslie et al. 2020: a clipped distance, or whether a summary and a token belong together."""
    assert at.role is not None
    assert at.part is not None
    if (at.role[0, i] == SUMMARY) == (of.role[0, j] == SUMMARY):  # type: ignore[index]
        return int((of.pos[0, j] - at.pos[0, i]).clamp(-CLIP, CLIP)) + CLIP
    return 2 * CLIP + 1 + int(at.part[0, i] != of.part[0, j])  # type: ignore[index]


def sees(place: Place, i: int, j: int, reads: Mask) -> bool:
    assert place.role is not None
    assert place.part is not None
    mine, other = (place.role[0, n] == SUMMARY for n in (i, j))
    if mine and not other:
        return reads == Everything() or bool(place.part[0, i] == place.part[0, j])
    return bool(other) or bool((place.pos[0, i] - place.pos[0, j]).abs() <= WINDOW)


def by_hand(place: Place, q: Tensor, k: Any, v: Any, labels: Any, reads: Mask) -> Tensor:
    """One pair at a time; keys, values and labels by pair."""
    n, width = place.pos.shape[1], DIM // HEADS
    y = torch.zeros(HEADS, n, width, dtype=q.dtype)
    for h in range(HEADS):
        for i in range(n):
            seen = [j for j in range(n) if sees(place, i, j, reads)]
            rows = [label(place, place, i, j) for j in seen]
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
    with torch.no_grad():
        for value in layer.double().parameters():
            value.add_(torch.randn_like(value), alpha=0.3)
    return layer


@pytest.mark.parametrize("reads", [Everything(), Part()], ids=repr)
def test_shared_projections(reads: Mask) -> None:
    mask = pieces(Role(SUMMARY), l2l=around(WINDOW) | Global(Role(GLOBAL)), g2l=reads)
    layer = shaken(Attention(DIM, HEADS, Softmax(mask), position=Labels(DIM // HEADS, HEADS, CLIP)))
    place = body(EachPart(STRETCH)).place(place_of([[0] * LENGTH]), 1)
    x = torch.randn(1, LENGTH + 3, DIM, dtype=torch.float64)
    k, v = (heads_of(part[0]) for part in layer.to_kv(x).chunk(2, -1))
    y = by_hand(
        place,
        heads_of(layer.to_q(x)[0]),
        lambda i, j: k[:, j],
        lambda i, j: v[:, j],
        lambda i: layer.position,
        reads,
    )
    torch.testing.assert_close(layer(x, Context(place)).y[0], layer.out(y), atol=1e-12, rtol=0)


@pytest.mark.parametrize("reads", [Everything(), Part()], ids=repr)
def test_each_piece_with_keys_and_values_of_its_own(reads: Mask) -> None:
    l2l = around(WINDOW) | Global(Role(GLOBAL))
    layer = shaken(FourPieces(DIM, HEADS, g2l=reads, l2l=l2l, position=lambda: Labels(DIM // HEADS, HEADS, CLIP)))
    place = body(EachPart(STRETCH)).place(place_of([[0] * LENGTH]), 1)
    x = torch.randn(1, LENGTH + 3, DIM, dtype=torch.float64)

    def side(i: int) -> Any:
        return layer.summaries if i < 3 else layer.text

    def pair(i: int, j: int, which: int) -> Tensor:
        project = side(i).summaries if j < 3 else side(i).text
        return heads_of(project(x[0]).chunk(2, -1)[which])[:, j]

    q = heads_of(torch.cat([layer.summaries.q(x[0, :3]), layer.text.q(x[0, 3:])]))
    y = by_hand(place, q, lambda i, j: pair(i, j, 0), lambda i, j: pair(i, j, 1), lambda i: side(i).position, reads)
    wanted = torch.cat([layer.summaries.out(y[:3]), layer.text.out(y[3:])])
    torch.testing.assert_close(layer(x, Context(place)).y[0], wanted, atol=1e-12, rtol=0)
    with pytest.raises(ValueError, match="put it into Summarised"):
        layer(x, Context(place._replace(layout=None)))


def test_a_wide_window_without_labels_is_ordinary_attention() -> None:
    """Ainslie et al. 2020: the four pieces then are one."""
    mask = pieces(Role(SUMMARY), l2l=around(LENGTH))
    layer, plain = (Attention(DIM, HEADS, Softmax(kind)).double() for kind in (mask, Everything()))
    plain.load_state_dict(layer.state_dict())
    place = body(EachPart(STRETCH)).place(place_of([[0] * LENGTH]), 1)
    x = torch.randn(1, LENGTH + 3, DIM, dtype=torch.float64)
    torch.testing.assert_close(layer(x, Context(place)).y, plain(x, Context(place)).y, atol=1e-12, rtol=0)


SMALL = {"vocab": 23, "dim": 16, "heads": 2, "hidden": 24, "dropout": 0.0}
BIGBIRD = {"block": 4, "longest": 64, "random": 1, "summaries": 2}


@pytest.mark.parametrize(
    ("name", "words"),
    [("etc", {}), ("etc", {"projections": "separate", "reads": "part"}), ("bigbird-etc", BIGBIRD)],
    ids=["shared", "separate", "bigbird"],
)
def test_long_texts_in_blocks_and_short_ones_written_out_are_the_same(name: str, words: dict[str, Any]) -> None:
    """A plan made from the layout, one made from the numbers, and none."""
    window = {} if name == "bigbird-etc" else {"window": 5, "part": 16}
    model = shaken(mf.build(name, **SMALL, depth=1, **window, **words)).eval()
    tokens = torch.randint(5, 23, (1, 203))
    numbers = torch.zeros(1, 206, dtype=torch.long)
    numbers[:, 203:] = PADDING
    longer = torch.cat([tokens, tokens[:, :3]], 1)
    kernels = [part for part in model.modules() if isinstance(part, Softmax)]
    with torch.no_grad():
        whole, padded = model(tokens).logits, model(longer, numbers).logits[:, :203]
        for kernel in kernels:
            kernel.path = "naive"
        torch.testing.assert_close(whole, model(tokens).logits, atol=1e-10, rtol=0)
        torch.testing.assert_close(whole, padded, atol=1e-10, rtol=0)
    said = mf.explain(model.float(), tokens)
    assert said
    assert kernels


def test_any_two_tokens_are_two_steps_apart() -> None:
    """Through a summary; without one a window leads no further than its layers reach."""
    for depth, leads in ((1, False), (2, True)):
        model = shaken(mf.build("etc", **SMALL, depth=depth, window=2, part=4)).eval()
        vectors = torch.randn(1, 40, 16, dtype=torch.float64, requires_grad=True)
        place = locate(torch.zeros(1, 40, dtype=torch.long), None, None)[0]
        y = model.body(vectors, Context(place)).y
        (gradient,) = torch.autograd.grad(y[0, 0].sum(), vectors)
        assert bool((gradient[0, -1] != 0).any()) == leads


def test_nonsense_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token, not 0"):
        EachPart(0)
    with pytest.raises(ValueError, match="at least one summary, not 0"):
        Leading(0)
    with pytest.raises(ValueError, match="clip \\(0\\)"):
        Labels(4, 2, 0)
    with pytest.raises(ValueError, match="cannot go on from a state"):
        body(Leading(1))(torch.zeros(1, 2, DIM), Context(place_of([[0, 0]])), [()])
