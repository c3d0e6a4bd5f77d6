"""KERPLE, FIRE and CoPE: their formulas in plain loops with gradients, in packed and padded rows, and step by step."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyformer.nn import Attention, KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Context, TokenPositions
from manyformer.nn.masks import Causal, Window
from manyformer.nn.positions import ComposedPosition, ContextualPosition, FirePosition, KerplePosition, Position
from token_rows import range_positions, segment_positions

HEADS, WIDTH = 2, 4


def kerple_bias(position: KerplePosition, head: int, i: int, j: int) -> Tensor:
    r1, raw_r2 = position.raw_r1[head].exp().log1p(), position.raw_r2[head]
    if position.variant == "power":
        return -r1 * float(i - j) ** (2 / (1 + (-raw_r2).exp()))
    return -r1 * (1 + raw_r2.exp().log1p() * (i - j)).log()


def fire_bias(position: FirePosition, head: int, i: int, j: int) -> Tensor:
    def psi(x: Tensor | float) -> Tensor:
        return (position.c * x + 1).log()

    length = position.length * position.length_factor
    share = psi(i - j) / (psi(i if i > length.item() else length) + 1e-6)
    hidden = (position.hidden.weight[:, 0] * share + position.hidden.bias).clamp(min=0)
    return position.output[head] @ hidden


def contextual_term(position: ContextualPosition, q: Tensor, keys: list[Tensor], j: int) -> Tensor:
    """The term for key j of `keys`, the last of which is the query's own."""
    count = sum(torch.sigmoid(q @ k / math.sqrt(WIDTH)) for k in keys[j:])
    assert isinstance(count, Tensor)
    if count >= len(position.vectors) - 1:
        return q @ position.vectors[-1]
    lower = int(count.item())
    return q @ ((lower + 1 - count) * position.vectors[lower] + (count - lower) * position.vectors[lower + 1])


def attention_by_hand(position: Position, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one document, (h, l, e) each, one pair at a time."""
    rows = []
    for head in range(HEADS):
        for i in range(q.shape[1]):
            keys, scores = list(k[head, : i + 1]), []
            for j, key in enumerate(keys):
                if isinstance(position, ContextualPosition):
                    term = contextual_term(position, q[head, i], keys, j)
                elif isinstance(position, FirePosition):
                    term = fire_bias(position, head, i, j)
                else:
                    assert isinstance(position, KerplePosition)
                    term = kerple_bias(position, head, i, j)
                scores.append(q[head, i] @ key / math.sqrt(WIDTH) + term)
            rows.append(torch.stack(scores).softmax(0) @ v[head, : i + 1])
    return torch.stack(rows).view(HEADS, q.shape[1], -1)


def contextual() -> ContextualPosition:
    position = ContextualPosition(WIDTH, 4)
    torch.nn.init.normal_(position.vectors)
    return position


POSITIONS: dict[str, Callable[[], Position]] = {
    "kerple": lambda: KerplePosition(HEADS),
    "kerple-power": lambda: KerplePosition(HEADS, "power"),
    "fire": lambda: FirePosition(HEADS, width=7, length=4.5),
    "cope": contextual,
}


@pytest.mark.parametrize("path", ["naive", "blocked"])
@pytest.mark.parametrize("name", POSITIONS)
def test_attention_is_the_formula_in_each_packed_document(name: str, path: str) -> None:
    position = POSITIONS[name]().double()
    pad = PADDING_SEGMENT
    places = segment_positions([[0] * 9, [pad, 0, 0, 0, 1, 1, 1, 1, pad]])
    q, k, v = (torch.randn(2, HEADS, 9, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(3))
    kernel = SoftmaxKernel(Causal(), path=path)  # type: ignore[arg-type]
    y = kernel(KernelCall(q, k, v, places, places, position)).y
    documents = [(row, s) for row, ids in enumerate(places.segment_ids.tolist()) for s in sorted(set(ids) - {pad})]
    actual, expected = [], []
    for row, segment in documents:
        columns = (places.segment_ids[row] == segment).nonzero()[:, 0]
        actual.append(y[row, :, columns])
        expected.append(attention_by_hand(position, *(x[row][:, columns] for x in (q, k, v))))
    leaves = [q, k, v, *position.parameters()]
    upstream = [torch.randn_like(x) for x in actual]
    results = [*actual, *torch.autograd.grad(actual, leaves, upstream)]
    wanted = [*expected, *torch.autograd.grad(expected, leaves, upstream)]
    assert all(gradient.abs().max() > 1e-4 for gradient in wanted[len(expected) :])
    torch.testing.assert_close(results, wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", POSITIONS)
def test_steps_equal_one_call(name: str) -> None:
    layer = Attention(8, HEADS, SoftmaxKernel(Causal()), position=POSITIONS[name]()).double()
    x, state = (
        torch.randn(2, 11, 8, dtype=torch.float64),
        layer.init_state(2, device=torch.device("cpu"), dtype=torch.float64),
    )
    full, pieces = layer(x, Context(batch_positions(0, 11))).y, []
    for start, stop in ((0, 5), (5, 6), (6, 10), (10, 11)):
        y, state, _ = layer(x[:, start:stop], Context(batch_positions(start, stop)), state)
        pieces.append(y)
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-10, rtol=0)


def batch_positions(start: int, stop: int) -> TokenPositions:
    positions = range_positions(stop - start, start)
    return positions._replace(
        position_ids=positions.position_ids.expand(2, -1), segment_ids=positions.segment_ids.expand(2, -1)
    )


def test_fire_is_a_function_of_the_share_beyond_its_length() -> None:
    """At twice the position and twice the distance, psi is nearly linear for a small c, so the bias stays."""
    position = FirePosition(HEADS, length=4.0).double()
    torch.nn.init.constant_(position.c, 1e-4)
    q = torch.zeros(1, HEADS, 1, WIDTH, dtype=torch.float64)
    biases = []
    for i, j in ((100, 25), (200, 50)):
        query, key = range_positions(1, i, plain=False), range_positions(1, j, plain=False)
        biases.append(position.score(torch.zeros(1, HEADS, 1, 1, dtype=torch.float64), q, q, query, key).flatten())
    torch.testing.assert_close(*biases, atol=2e-3, rtol=0)
    assert biases[0].abs().max() > 1e-2


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_variant_one_position_and_kernels_that_skip_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="variant 'square' must be one of logarithmic, power"):
        KerplePosition(2, "square")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"count \(1\) must be at least 2"):
        ContextualPosition(4, 1)
    for position in (ContextualPosition(4), ComposedPosition(KerplePosition(2), ContextualPosition(4))):
        with pytest.raises(ValueError, match=r"SoftmaxKernel does not support .* every earlier token"):
            Attention(8, 2, SoftmaxKernel(Window(3)), position=position)
