"""Biases and vectors by distance, against the formulas of their papers in plain loops, and against themselves."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyformer as mf
from manyformer.models import TokenEmbedding
from manyformer.models.embedding import positions_of
from manyformer.nn import Attention, KernelCall, SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Chain, Context, TokenPositions
from manyformer.nn.feed_forward.feedforward import FeedForward
from manyformer.nn.masks import AllKeys, Causal, Mask
from manyformer.nn.ops.softmax_attention import softmax_attention_reference
from manyformer.nn.positions import (
    AlibiPosition,
    DistanceAwarePosition,
    KerplePosition,
    NoPosition,
    Position,
    ShawPosition,
    SinusoidalPosition,
    T5BiasPosition,
)
from manyformer.nn.positions.distance_bias import bucket_edges
from manyformer.recipes.parts.baselines import branch
from token_rows import range_positions, segment_positions


def attend(qkv: tuple[Tensor, ...], position: Position, positions: TokenPositions, causal: bool) -> Tensor:
    mask = torch.ones(1, 1, *[positions.position_ids.shape[1]] * 2, dtype=torch.bool)
    q, k, v = qkv
    scale = q.shape[-1] ** -0.5
    mask = mask.tril() if causal else mask
    return softmax_attention_reference(
        q, k, v, mask, scale=scale, position=position, query_positions=positions, key_positions=positions
    )[0]


def test_slopes_of_eight_and_of_twelve_heads() -> None:
    eight = [2.0**-n for n in range(1, 9)]
    assert AlibiPosition(8).slopes.tolist() == eight
    torch.testing.assert_close(AlibiPosition(12).slopes, torch.tensor([*eight, *(2.0 ** -(n + 0.5) for n in range(4))]))


def test_slopes_survive_a_change_of_type() -> None:
    assert AlibiPosition(12).bfloat16().slopes.equal(AlibiPosition(12).slopes)


@pytest.mark.parametrize("causal", [True, False])
def test_alibi_is_the_formula(causal: bool) -> None:
    place, heads, length, width = segment_positions([[0] * 9]), 2, 9, 4
    q, k, v = (torch.randn(1, heads, length, width, dtype=torch.float64) for _ in range(3))
    y = attend((q, k, v), AlibiPosition(heads), place, causal)
    for h in range(heads):
        for i in range(length):
            keys = range(i + 1) if causal else range(length)
            slope = 2.0 ** (-4 * (h + 1))
            scores = [float(q[0, h, i] @ k[0, h, j]) / math.sqrt(width) - slope * abs(i - j) for j in keys]
            weights = torch.tensor(scores, dtype=torch.float64).softmax(0)
            torch.testing.assert_close(y[0, h, i], weights @ v[0, h, : len(keys)], atol=1e-12, rtol=0)


@pytest.mark.parametrize("sides", ["past", "both"])
@pytest.mark.parametrize("each_head", [True, False])
def test_shaw_is_the_formula(sides: str, each_head: bool) -> None:
    heads, length, width, clip = 2, 9, 4, 3
    causal = sides == "past"
    position = ShawPosition(width, clip, heads=heads if each_head else None, direction=sides).double()  # type: ignore[arg-type]
    assert position.keys.shape[-2] == (clip + 1 if causal else 2 * clip + 1)
    q, k, v = (torch.randn(1, heads, length, width, dtype=torch.float64) for _ in range(3))
    y = attend((q, k, v), position, segment_positions([[0] * length]), causal)
    for h in range(heads):
        keys, values = (table[h] if each_head else table for table in (position.keys, position.values))
        for i in range(length):
            seen = range(i + 1) if causal else range(length)
            rows = [max(-clip, min(clip, j - i)) + clip for j in seen]
            scores = [q[0, h, i] @ (k[0, h, j] + keys[row]) / math.sqrt(width) for j, row in zip(seen, rows)]
            weights = torch.stack(scores).softmax(0)
            expected = sum(w * (v[0, h, j] + values[row]) for w, j, row in zip(weights, seen, rows))
            torch.testing.assert_close(y[0, h, i], expected, atol=1e-12, rtol=0)


def test_buckets_of_the_paper() -> None:
    past = T5BiasPosition(1, direction="past").bucket_index(-torch.tensor([0, 1, 15, 16, 18, 19, 112, 113, 10_000]))
    assert past.tolist() == [0, 1, 15, 16, 16, 17, 30, 31, 31]
    both = T5BiasPosition(1).bucket_index(torch.tensor([0, -1, 1, -7, 7, -8, 8, -1000, 1000]))
    assert both.tolist() == [0, 1, 17, 7, 23, 8, 24, 15, 31]
    assert (T5BiasPosition(1, direction="past").bucket_index(torch.arange(1, 9)) == 0).all()


def test_bucket_edges_are_the_logarithms_where_those_are_certain() -> None:
    for buckets, far in ((32, 128), (16, 128), (8, 20), (64, 1000)):
        exact = buckets // 2
        edges = bucket_edges(buckets, far)
        assert len(edges) == buckets - 1
        for n in range(exact, 2 * far):
            spot = math.log(n / exact) / math.log(far / exact) * (buckets - exact)
            if abs(spot - round(spot)) > 1e-9:
                assert sum(edge <= n for edge in edges) == min(exact + int(spot), buckets - 1)


POSITIONS = {
    "alibi": lambda: AlibiPosition(3),
    "t5": lambda: T5BiasPosition(3, buckets=8, max_distance=9),
    "t5 past": lambda: T5BiasPosition(3, buckets=8, max_distance=9, direction="past"),
    "kerple": lambda: KerplePosition(3),
    "kerple power": lambda: KerplePosition(3, "power"),
    "shaw": lambda: ShawPosition(4, 3),
    "shaw past": lambda: ShawPosition(4, 3, heads=3, direction="past"),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_what_it_says_by_distance_is_what_it_does(name: str) -> None:
    position, length = POSITIONS[name](), 12
    place = segment_positions([[0] * length])
    actual = position.distance_terms(length - 1, length - 1)
    assert actual is not None
    ahead = torch.arange(length) - torch.arange(length)[:, None]
    rows = ahead.clamp(-actual.lookback, actual.lookahead) + actual.lookback
    q, k = torch.randn(2, 1, 3, length, 4)
    terms = torch.zeros(1, 3, length, length)
    if actual.bias is not None:
        terms = terms + actual.bias[None, :, rows]
    if actual.keys is not None:
        terms = terms + torch.einsum("bhle,hlse->bhls", q, actual.keys.expand(3, -1, -1)[:, rows])
    torch.testing.assert_close(position.score(torch.zeros_like(terms), q, k, place, place), terms)
    weights, y = torch.rand(1, 3, length, length), torch.zeros(1, 3, length, 4)
    values = 0.0 if actual.values is None else actual.values.expand(3, -1, -1)[:, rows]
    torch.testing.assert_close(position.value(y, weights, place, place), (weights[..., None] * values).sum(-2) + y)


@pytest.mark.parametrize("name", POSITIONS)
def test_padding_and_packing_change_no_distance(name: str) -> None:
    position = POSITIONS[name]()
    q, k = torch.randn(2, 1, 3, 8, 4)
    alone, packed = segment_positions([[0] * 5]), segment_positions([[PADDING_SEGMENT, 3, 3] + [4] * 5])
    logits = torch.zeros(1, 3, 8, 8)
    expected = position.score(logits[..., 3:, 3:], q[:, :, 3:], k[:, :, 3:], alone, alone)
    torch.testing.assert_close(position.score(logits, q, k, packed, packed)[..., 3:, 3:], expected)


@pytest.mark.usefixtures("unchecked")
def test_sizes_and_directions_without_distances_are_refused() -> None:
    with pytest.raises(ValueError, match=r"heads \(0\) must be at least 1"):
        AlibiPosition(0)
    with pytest.raises(ValueError, match=r"clip \(0\) must be at least 1"):
        ShawPosition(4, 0)
    with pytest.raises(ValueError, match=r"buckets \(6\) must be a multiple of 4"):
        T5BiasPosition(2, buckets=6)
    with pytest.raises(ValueError, match=r"max_distance \(16\) must be above 16"):
        T5BiasPosition(2, max_distance=16, direction="past")
    with pytest.raises(ValueError, match="direction 'left' must be one of past, both"):
        ShawPosition(4, 2, direction="left")  # type: ignore[arg-type]


HEADS, DIM = 3, 12


def double(numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def made(w: list[float], v: list[float]) -> DistanceAwarePosition:
    part = DistanceAwarePosition(len(w)).double()
    with torch.no_grad():
        part.w.copy_(double(w))
        part.v.copy_(double(v))
    return part


def of_each(part: DistanceAwarePosition, far: list[int]) -> Tensor:
    """The factor of each head (rows) at each distance."""
    return part.factor(torch.tensor(far))


def test_the_factor_is_the_formula() -> None:
    w, v, far = [-0.3, 0.0, 0.7], [0.5, -2.0, 1.5], [0, 1, 4, 30]
    expected = [
        [(1 + math.exp(b)) / (1 + math.exp(b - a * distance)) for distance in far] for a, b in zip(w, v, strict=True)
    ]
    torch.testing.assert_close(of_each(made(w, v), far), double(expected), atol=1e-12, rtol=1e-12)


def test_closed_forms_and_limits() -> None:
    part = made([0.4, -0.4, 0.0], [1.0, 1.0, 3.0])
    table = of_each(part, list(range(200)))
    torch.testing.assert_close(table[:, 0], torch.ones(3).double())
    assert (table[0].diff() >= 0).all()
    assert (table[1].diff() <= 0).all()
    torch.testing.assert_close(table[:, -1], double([1 + math.e, 0.0, 1.0]), atol=1e-12, rtol=0)
    torch.testing.assert_close(table[2], torch.ones(200).double(), atol=1e-12, rtol=0)
    assert torch.equal(of_each(part, [-3]), of_each(part, [3]))


@pytest.mark.parametrize("v", [-1000.0, 1000.0])
def test_nothing_overflows(v: float) -> None:
    part = made([-2.0, 2.0], [v, v])
    table = of_each(part, [0, 1, 100])
    assert table.isfinite().all()
    table.sum().backward()
    assert part.w.grad is not None
    assert part.w.grad.isfinite().all()
    # far above every distance the factor is the plain exponential exp(R), far below it is 1
    expected = [[1.0, math.exp(-2), math.exp(-200)], [1.0, math.exp(2), math.exp(200)]] if v > 0 else [[1.0] * 3] * 2
    torch.testing.assert_close(table.detach(), double(expected), rtol=1e-6, atol=0)


def test_heads_start_near_and_far() -> None:
    assert DistanceAwarePosition(3).w.tolist() == pytest.approx([-0.1, 0.1, -0.1])
    assert not DistanceAwarePosition(3).v.any()


def by_hand(
    part: DistanceAwarePosition, q: Tensor, k: Tensor, v: Tensor, mask: Mask, positions: TokenPositions
) -> Tensor:
    seen = mask.dense(positions, positions, HEADS)[0, 0]
    y = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype)
    for h in range(HEADS):
        for i in range(q.shape[2]):
            scores = []
            for j in seen[i].nonzero()[:, 0].tolist():
                far = part.w[h] * abs(int(positions.position_ids[0, i] - positions.position_ids[0, j]))
                factor = (1 + part.v[h].exp()) / (1 + (part.v[h] - far).exp())
                scores.append(F.relu(q[0, h, i] @ k[0, h, j]) * factor / math.sqrt(q.shape[-1]))
            y[0, h, i] = torch.stack(scores).softmax(0) @ v[0, h, seen[i]]
    return y


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("mask", [Causal(), AllKeys()], ids=repr)
def test_attention_is_the_definition_with_gradients(mask: Mask, plain: bool) -> None:
    part = made([-0.3, 0.2, 0.1], [0.4, -0.3, 1.0])
    q, k, v = (torch.randn(1, HEADS, 6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    place = range_positions(6, plain=plain)
    expected = by_hand(part, q, k, v, mask, place)
    actual = SoftmaxKernel(mask)(KernelCall(q, k, v, place, place, part)).y
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    grad_output, leaves = torch.randn_like(expected), [q, k, v, part.w, part.v]
    pairs = zip(
        torch.autograd.grad(actual, leaves, grad_output),
        torch.autograd.grad(expected, leaves, grad_output),
        strict=True,
    )
    for ours, reference in pairs:
        assert reference.abs().max() > 0.01
        torch.testing.assert_close(ours, reference, atol=1e-10, rtol=0)


def test_queries_after_a_memory_and_before_all_keys() -> None:
    part, logits = made([-0.3, 0.2, 0.1], [0.4, -0.3, 1.0]), torch.randn(2, HEADS, 3, 5, dtype=torch.float64)
    q, k = torch.zeros(2, HEADS, 3, 4), torch.zeros(2, HEADS, 5, 4)
    for queries, keys in ((7, 5), (0, 9)):
        plain, other = (
            part.score(logits, q, k, range_positions(3, queries, plain=p), range_positions(5, keys))
            for p in (True, False)
        )
        torch.testing.assert_close(plain, other, atol=1e-12, rtol=0)


def test_without_a_slope_it_is_attention_with_relu() -> None:
    q, k, v = torch.randn(3, 1, HEADS, 6, 4, dtype=torch.float64)
    actual = SoftmaxKernel()(KernelCall(q, k, v, range_positions(6), range_positions(6), made([0.0] * 3, [0.7] * 3))).y
    torch.testing.assert_close(actual, (F.relu(q @ k.mT) / 2).softmax(-1) @ v, atol=1e-12, rtol=0)


def test_gradients_of_slope_and_limit() -> None:
    logits, far = torch.randn(2, 3, 3, dtype=torch.float64), torch.arange(3)[:, None] - torch.arange(3)

    def of(w: Tensor, v: Tensor) -> Tensor:
        part = DistanceAwarePosition(2).double()
        del part.w, part.v
        part.w, part.v = w, v  # type: ignore[assignment]
        return logits.relu() * part.factor(far)

    w, v = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([-0.3, 0.8], [0.2, -1.1]))
    assert torch.autograd.gradcheck(of, (w, v))


@pytest.mark.parametrize("mask", [Causal(), AllKeys()], ids=repr)
def test_padding_packing_shifts_and_caches_change_nothing(mask: Mask) -> None:
    layer = Attention(DIM, HEADS, SoftmaxKernel(mask), position=DistanceAwarePosition(HEADS)).double()
    x = torch.randn(1, 7, DIM, dtype=torch.float64)
    full = layer(x, Context(range_positions(7))).y[0]
    torch.testing.assert_close(layer(x, Context(range_positions(7, 100_000))).y[0], full, atol=1e-10, rtol=0)
    segments = torch.tensor([[PADDING_SEGMENT] * 4 + [0] * 7, [0] * 3 + [1] * 7 + [PADDING_SEGMENT]])
    place, _ = positions_of(segments, segments, None)
    rows = torch.randn(2, 11, DIM, dtype=torch.float64)
    rows[0, 4:], rows[1, 3:10] = x[0], x[0]
    actual = layer(rows, Context(place)).y
    torch.testing.assert_close(actual[0, 4:], full, atol=1e-10, rtol=0)
    torch.testing.assert_close(actual[1, 3:10], full, atol=1e-10, rtol=0)
    if mask == Causal():
        state, pieces = layer.init_state(1, device=x.device, dtype=x.dtype), []
        for a, b in ((0, 1), (1, 5), (5, 7)):
            out = layer(x[:, a:b], Context(range_positions(b - a, a)), state)
            state, pieces = out.state, [*pieces, out.y[0]]
        torch.testing.assert_close(torch.cat(pieces), full, atol=1e-10, rtol=0)


def test_a_text_and_its_reverse_are_alike() -> None:
    """Nothing in the encoder tells left from right; with sinusoids it would."""
    tokens = torch.randint(0, 50, (2, 9))
    model: Any = mf.build("da-transformer", vocab=50, dim=16, depth=2, heads=4).eval()
    torch.testing.assert_close(model(tokens.flip(1)).logits, model(tokens).logits, atol=1e-5, rtol=0)
    other: Any = mf.build("transformer-classifier", vocab=50, dim=16, depth=2, heads=4).eval()
    assert (other(tokens.flip(1)).logits - other(tokens).logits).abs().max() > 1e-3


NEAR, MARK = 3, 1


def markers(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens with a few marks, and for each token whether a mark is at most three places away."""
    tokens = torch.randint(2, 8, (rows, length), generator=generator)
    tokens[torch.rand(rows, length, generator=generator) < 0.05] = MARK
    near = F.max_pool1d((tokens == MARK).float()[:, None], 2 * NEAR + 1, stride=1, padding=NEAR)[:, 0]
    return tokens, near.long()


class Near(nn.Module):
    """One layer that labels every token."""

    def __init__(self, inside: Callable[[], Position], outside: Position) -> None:
        super().__init__()
        dim, heads = 32, 4
        self.embed = TokenEmbedding(8, dim, position=outside, scale=dim**0.5)
        attention = Attention(dim, heads, SoftmaxKernel(), position=inside())
        parts = {"attention": attention, "ff": FeedForward(dim, 64)}
        self.body = Chain(**{n: branch(p, order="pre", norm=lambda: nn.LayerNorm(dim)) for n, p in parts.items()})
        self.head = nn.Linear(dim, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        place, _ = positions_of(tokens, None, None)
        logits: Tensor = self.head(self.body(self.embed(tokens, place), Context(place)).y)
        return logits


def accuracy_at_twice_the_length(inside: Callable[[], Position], outside: Position) -> tuple[float, float]:
    """Trained at 48 tokens: the share of right labels there and at 96 tokens."""
    torch.manual_seed(0)
    model, generator = Near(inside, outside), torch.Generator().manual_seed(1)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = 5e-3 * min(1.0, (step + 1) / 20) * (1 - step / STEPS)
        tokens, labels = markers(32, 48, generator)
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimiser.step()
        optimiser.zero_grad()
    actual = []
    with torch.no_grad():
        for length in (48, 96):
            tokens, labels = markers(64, length, generator)
            actual.append(float((model(tokens).argmax(-1) == labels).float().mean()))
    return actual[0], actual[1]


STEPS = 150


@pytest.mark.slow
def test_what_is_near_stays_near_in_longer_texts() -> None:
    """ "Is a mark at most three places away?", learnt at 48 tokens and asked at 96: distances carry over."""
    aware = accuracy_at_twice_the_length(lambda: DistanceAwarePosition(4), NoPosition())
    absolute = accuracy_at_twice_the_length(NoPosition, SinusoidalPosition(32))
    blind = accuracy_at_twice_the_length(NoPosition, NoPosition())
    errors = f"distance-aware {aware}, sinusoid {absolute}, none {blind}"
    assert aware[1] >= 0.95, errors
    assert aware[1] >= absolute[1] + 0.05, errors
    assert aware[1] >= blind[1] + 0.1, errors
