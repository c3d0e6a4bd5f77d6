"""Attention among neighbouring chunks equals a dense softmax over the pairs that meet, found by counting one by one."""

from collections import Counter
from itertools import product

import pytest
import torch
from torch import Tensor

from manyformer.nn.clustered import chunk_gather_attention, lsh_hashing
from manyformer.nn.clustered.bucket_chunks import ChunkUnit, document_lengths, sort_into_chunks
from manyformer.nn.clustered.chunk_gather_attention import ChunkVisibility

LENGTH, CHUNK, WIDTH, ROUNDS = 37, 4, 6, 3
SEG = torch.tensor([[0] * 37, [-1] * 5 + [3] * 32, [0] * 14 + [7] * 20 + [-1] * 3, [-1] * 37])


def positions() -> Tensor:
    pos = torch.arange(LENGTH).repeat(4, 1)
    pos[1], pos[2, 14:] = pos[1] - 5, pos[2, 14:] - 14
    return pos


def met(bucket: Tensor, unit: ChunkUnit, before: int, after: int, causal: bool) -> Tensor:
    """Who sees whom, by counting tokens one by one."""
    pos, actual = positions(), torch.zeros(4, LENGTH, LENGTH, dtype=torch.bool)
    for one, row in product(bucket, range(4)):
        count: Counter[tuple[int, ...]] = Counter()
        chunk = torch.zeros(LENGTH, dtype=torch.long)
        for t in sorted(range(LENGTH), key=lambda t: (int(SEG[row, t]), int(one[row, t]), t)):
            key = (int(SEG[row, t]), int(one[row, t])) if unit == "bucket" else (int(SEG[row, t]),)
            chunk[t] = count[key] // CHUNK
            count[key] += 1
        apart = chunk[:, None] - chunk
        same = (SEG[row, :, None] == SEG[row]) & (one[row, :, None] == one[row])
        allowed = pos[row, :, None] > pos[row] if causal else ~torch.eye(LENGTH, dtype=torch.bool)
        actual[row] |= same & allowed & (apart <= before) & (apart >= -after) & (SEG[row] >= 0)
    own = torch.eye(LENGTH, dtype=torch.bool) & (SEG >= 0)[:, None]
    return actual | (own & ~actual.any(-1, keepdim=True))


def drawn(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    q, v = torch.randn(4, LENGTH, WIDTH, dtype=dtype), torch.randn(4, LENGTH, WIDTH, dtype=dtype)
    k = torch.nn.functional.normalize(q, dim=-1)
    return [x.requires_grad_() for x in (q.detach(), k, v)], torch.randint(5, (ROUNDS, 4, LENGTH))


@pytest.mark.parametrize(
    ("unit", "before", "after", "dtype"),
    [
        ("bucket", 1, 0, torch.float64),
        ("bucket", 2, 0, torch.float32),
        ("document", 1, 0, torch.float64),
        ("document", 1, 1, torch.float64),
        ("document", 0, 0, torch.float64),
    ],
)
def test_the_same_as_a_dense_softmax(unit: ChunkUnit, before: int, after: int, dtype: torch.dtype) -> None:
    inputs, bucket = drawn(dtype)
    mask = met(bucket, unit, before, after, not after)
    scores = (inputs[0] @ inputs[1].mT * 0.7).masked_fill(~mask, -torch.inf)
    real = SEG >= 0
    expected = (scores.masked_fill(~real[..., None], 0.0).softmax(-1) @ inputs[2])[real]
    ways = tuple(sort_into_chunks(one, SEG, CHUNK, unit=unit, reach=before + after) for one in bucket)
    sight = ChunkVisibility(ways, before, after, causal=not after)
    q, k, v = (x.flatten(0, 1) for x in inputs)
    actual = chunk_gather_attention.chunk_gather_attention(q, k, v, sight, scale=0.7).view(4, LENGTH, -1)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    assert (actual[real] - expected).abs().max() < tolerance
    grad_output = torch.randn_like(expected)
    for one, other in zip(
        torch.autograd.grad(actual[real], inputs, grad_output), torch.autograd.grad(expected, inputs, grad_output)
    ):
        assert (one - other).abs().max() < 10 * tolerance


def test_in_pieces_and_without_weights_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, bucket = drawn(torch.float64)
    ways = tuple(sort_into_chunks(one, SEG, CHUNK, unit="bucket", reach=1) for one in bucket)
    sight = ChunkVisibility(ways, 1, 0, causal=True)
    q, k, v = (x.flatten(0, 1) for x in inputs)
    actual = []
    for pairs, kept in ((1 << 18, 1 << 24), (100, 1 << 24), (100, 0)):
        monkeypatch.setitem(chunk_gather_attention.PAIRS_PER_CALL, "cpu", pairs)
        monkeypatch.setattr(chunk_gather_attention, "MAX_SAVED_WEIGHTS", kept)
        y = chunk_gather_attention.chunk_gather_attention(q, k, v, sight, scale=1.0)
        actual.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
    for one, *others in zip(*actual):
        assert all((one - other).abs().max() < 1e-13 for other in others)


def test_chunks_begin_with_their_unit() -> None:
    torch.manual_seed(1)
    bucket = torch.randint(3, (4, LENGTH))
    units: tuple[ChunkUnit, ...] = ("document", "bucket")
    for unit in units:
        actual = sort_into_chunks(bucket, SEG, CHUNK, unit=unit, reach=1)
        there = actual.tokens[actual.tokens >= 0]
        assert there.sort().values.tolist() == (SEG.flatten() >= 0).nonzero()[:, 0].tolist()
        assert torch.equal(actual.tokens.flatten()[actual.slot[there]], there)
        assert bool((actual.slot[SEG.flatten() < 0] == actual.tokens.numel()).all())
        for chunk in actual.tokens:
            tokens = chunk[chunk >= 0]
            inside = {(int(SEG.flatten()[t]), int(bucket.flatten()[t])) for t in tokens}
            assert len({one[0] for one in inside} if unit == "document" else inside) == 1
            assert len({int(t) // LENGTH for t in tokens}) == 1
            # full but for the last one of the unit
            assert bool((chunk[: len(tokens)] >= 0).all())


def test_padding_sees_itself_where_there_is_nothing_else() -> None:
    seg = torch.full((2, 5), -1)
    way = sort_into_chunks(torch.zeros_like(seg), seg, 2, unit="document", reach=1)
    assert way.tokens.shape == (0, 2)
    x = torch.randn(10, 3, requires_grad=True)
    y = chunk_gather_attention.chunk_gather_attention(x, x, x, ChunkVisibility((way,), 1, 0, causal=True), scale=1.0)
    assert torch.equal(y, x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.ones_like(x))


def test_sizes_of_documents() -> None:
    assert document_lengths(torch.tensor([[4, 4, -1, 2, 2, 2], [0, 0, 0, 0, 0, 4]])).tolist() == [
        [2, 2, 1, 3, 3, 3],
        [5, 5, 5, 5, 5, 1],
    ]


def test_draws_are_normal_and_their_own() -> None:
    one, other = (lsh_hashing.counter_normal(torch.tensor(seed), 4, 25_000) for seed in (3, 4))
    for x in (one, other):
        assert x.mean().abs() < 0.01
        assert (x.std() - 1).abs() < 0.01
        assert (x.pow(4).mean() - 3).abs() < 0.1
    assert (one * other).mean().abs() < 0.01
    assert (one[:, 1:] * one[:, :-1]).mean().abs() < 0.01
    assert torch.equal(lsh_hashing.counter_normal(torch.tensor(3), 2, 25_000), one[:2])


def test_buckets_are_nearest_directions() -> None:
    turns = lsh_hashing.rotations(torch.tensor(0), 2, 3, 5, (4, 6))
    x = torch.randn(2, 3, 7, 5)
    actual = lsh_hashing.buckets(x, turns)
    assert actual is not None
    for r, b, h, t in product(range(2), range(2), range(3), range(7)):
        parts = []
        for matrix in turns:
            near = x[b, h, t] @ matrix[r, h]
            parts.append(int(torch.cat([near, -near]).argmax()))
        assert int(actual[r, b, h, t]) == parts[0] + 4 * parts[1]
    assert lsh_hashing.buckets(x, ()) is None


def test_large_numbers_of_buckets_are_products() -> None:
    assert [lsh_hashing.bucket_factors(n) for n in (1, 2, 128, 256, 512)] == [(), (2,), (128,), (16, 16), (16, 32)]
    for wrong, message in ((0, "1 or even"), (7, "1 or even"), (134, "product of two even")):
        with pytest.raises(ValueError, match=message):
            lsh_hashing.bucket_factors(wrong)
