"""Choices by values as a device computes them that the host does not read: with room for all that could be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyformer.nn.clustered import bucket_chunks
from manyformer.nn.clustered.bucket_chunks import ChunkUnit, sort_into_chunks, units_per_row
from manyformer.nn.clustered.chunk_gather_attention import ChunkVisibility, chunk_gather_attention
from manyformer.nn.core import ContiguousLayout, PackedLayout, TokenPositions
from manyformer.nn.ops import chosen_attention
from manyformer.nn.runtime.device_reads import count_values, reads_are_free

ROWS, HEADS, LENGTH, DIM, BLOCK = 2, 2, 37, 4, 8


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def differentiated(y: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    direction = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
    return [y, *torch.autograd.grad((y * direction).sum(), inputs)]


def test_shapes_and_a_cpu_are_read_freely() -> None:
    assert reads_are_free(torch.zeros(2))
    assert reads_are_free(torch.zeros(2, device="meta"))


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 50)])
def test_counts_are_those_of_torch(shape: tuple[int, ...]) -> None:
    values = torch.randint(7, shape)
    assert torch.equal(count_values(values, 9), torch.bincount(values.flatten(), minlength=9))


@pytest.mark.parametrize("choices", [1, 3])
def test_chosen_blocks_need_not_be_counted(choices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q = drawn(ROWS, HEADS, LENGTH, DIM)
    k, v = drawn(ROWS, 1, LENGTH, DIM), drawn(ROWS, 1, LENGTH, 3)
    positions = torch.arange(LENGTH)
    draws = torch.rand(ROWS, HEADS, LENGTH, LENGTH // BLOCK).masked_fill(
        torch.arange(LENGTH // BLOCK) >= positions[:, None] // BLOCK, -1
    )
    best = draws.topk(choices)
    chosen = best.indices.masked_fill(best.values < 0, -1)
    scores = (q @ k.mT * 0.5).masked_fill(
        ~chosen_attention.choice_mask(chosen, BLOCK, positions[None], LENGTH), -torch.inf
    )
    expected = differentiated(scores.softmax(-1) @ v, [q, k, v])
    monkeypatch.setattr(chosen_attention, "reads_are_free", lambda x: False)
    actual = differentiated(chosen_attention.block_choice_attention(q, k, v, chosen, BLOCK, scale=0.5), [q, k, v])
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)


def test_no_chosen_block_at_all_leaves_a_querys_own(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = drawn(1, 1, BLOCK, DIM), drawn(1, 1, BLOCK, DIM), drawn(1, 1, BLOCK, 3)
    monkeypatch.setattr(chosen_attention, "reads_are_free", lambda x: False)
    chosen = torch.full((1, 1, BLOCK, 2), -1)
    hidden = torch.ones(BLOCK, BLOCK, dtype=torch.bool).triu(1)
    expected = (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(chosen_attention.block_choice_attention(q, k, v, chosen, BLOCK, scale=1.0), expected)


def layouts() -> dict[str, tuple[Tensor, Any]]:
    packed = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    packed[0, 10:], packed[0, 30:], packed[1, 20:] = 1, -1, -1
    documents = ((0, 0, 10), (0, 10, 30), (1, 0, 20))
    return {
        "contiguous": (torch.zeros(ROWS, LENGTH, dtype=torch.long), ContiguousLayout()),
        "packed": (packed, PackedLayout(documents)),
    }


@pytest.mark.parametrize("layout", layouts())
@pytest.mark.parametrize("unit", ["document", "bucket"])
def test_chunks_need_not_be_counted(layout: str, unit: ChunkUnit, monkeypatch: pytest.MonkeyPatch) -> None:
    buckets, size, lookback = 4, 5, 1
    segments, known = layouts()[layout]
    max_units = units_per_row(TokenPositions(segments.clamp(min=0), segments, known), unit, buckets)
    bucket = torch.randint(buckets, (ROWS, LENGTH))
    q, v = drawn(ROWS * LENGTH, DIM), drawn(ROWS * LENGTH, 3)
    is_token = segments.flatten() >= 0

    def attended() -> tuple[int, list[Tensor]]:
        chunks = sort_into_chunks(bucket, segments, size, unit=unit, reach=lookback, max_units=max_units)
        y = chunk_gather_attention(q, q, v, ChunkVisibility((chunks,), lookback, 0, causal=True), scale=0.5)
        return len(chunks.tokens), differentiated(y.where(is_token[:, None], 0.0), [q, v])

    counted, expected = attended()
    monkeypatch.setattr(bucket_chunks, "reads_are_free", lambda x: False)
    bounded, actual = attended()
    assert counted <= bounded <= ROWS * LENGTH
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
