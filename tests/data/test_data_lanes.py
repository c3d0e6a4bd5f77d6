"""LaneLayout: rows that go on from batch to batch, every target once, documents numbered in rising order."""

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data_rows import documents, pairs_of, shard_of
from torch import Tensor

from manyformer.config import TextData
from manyformer.config.data_sections import MarkedData, PeriodicData
from manyformer.data import open_data
from manyformer.data.batching.epochs import random_generator
from manyformer.data.batching.row_layouts import LaneLayout, TextRows
from manyformer.data.batching.text_epochs import NextTokenBatches, TextPlan
from manyformer.nn.batches import IGNORE_INDEX


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 12), st.integers(1, 5), st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_every_target_once_and_rows_go_on(sizes: list[int], length: int, rows: int, seed: int) -> None:
    shard = shard_of(sizes)
    expected = Counter(pair for tokens in documents(shard) for pair in itertools.pairwise(tokens))
    for epoch, random in enumerate((None, random_generator(seed, 0), random_generator(seed, 1))):
        arrangement = LaneLayout(shard, length, rows, shifted=True, pad=0).arrange(random, epoch)
        actual = arrangement.rows(np.arange(arrangement.count))
        assert pairs_of(actual) == expected
        assert arrangement.count % rows == 0
        assert actual.segments is not None
        for lane in range(rows):
            ours = TextRows(*(part[lane::rows].ravel() for part in actual))  # type: ignore[union-attr]
            real = ours.is_first_copy
            assert not (np.diff(real.astype(int)) > 0).any(), "padding stands at the end of a lane alone"
            assert ours.segments is not None
            numbers = ours.segments[real]
            assert (np.diff(numbers) >= 0).all()
            assert (ours.segments[~real] == -1).all()
            assert (ours.targets[~real] == IGNORE_INDEX).all()
            # a target is the next token of the lane
            tokens, targets = ours.tokens[real], ours.targets[real]
            known = targets[:-1] != IGNORE_INDEX
            assert (targets[:-1][known] == tokens[1:][known]).all()
            # a document begins where the number changes
            assert ((np.diff(numbers) > 0) <= (tokens[1:] == 1)).all()


def test_numbers_rise_through_all_epochs_and_positions_are_kept(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("In the beginning was the word. " * 40)
    config: Any = TextData(path=str(file), length=16, packing="contiguous", valid=0.2)
    data, again = (open_data(config, "next-token", batch_tokens=64, cache=tmp_path / "c", seed=0) for _ in "12")
    assert data.train.rows_continue
    assert data.valid.rows_continue
    last = torch.full((4,), -1)
    for _ in range(3 * data.train.batches):
        batch = next(data.train)
        assert batch.segments is not None
        real = batch.segments.amax(1)
        assert ((batch.segments[:, 0] >= last) | (real < 0)).all()
        last = torch.maximum(last, real)
    again.train.load_state_dict(data.train.state_dict())
    actual, expected = next(again.train), next(data.train)
    assert actual._fields == expected._fields
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other
    assert "each continuing the same row of the previous batch" in data.summary_lines[-1]


def test_ranks_have_lanes_of_their_own() -> None:
    shard = shard_of([50, 60])
    full = TextPlan(LaneLayout(shard, 4, 4, shifted=True, pad=0), 4, NextTokenBatches(), "x").epoch(0, 0)
    assert full.rows_continue
    assert all(len(full.batch(number).tokens) == 4 for number in range(len(full)))


@pytest.mark.parametrize("rule", ["periodic", "marked"])
def test_a_rule_s_sequences_in_parts(rule: str, tmp_path: Path) -> None:
    section = MarkedData if rule == "marked" else partial(PeriodicData, period=5)
    parts = section(symbols=17, length=8, valid=640, rows_per_sequence=4)
    full = section(symbols=17, length=32, valid=640)
    cut, one = (
        open_data(data, "next-token", batch_tokens=3 * data.length, cache=tmp_path, seed=0) for data in (parts, full)
    )
    pieces, expected = [next(cut.train) for _ in range(8)], [next(one.train) for _ in range(2)]
    for number in range(2):
        ours = pieces[4 * number : 4 * number + 4]
        assert torch.equal(torch.cat([piece.tokens for piece in ours], 1), expected[number].tokens)
        assert torch.equal(torch.cat([piece.targets for piece in ours], 1), expected[number].targets)
        assert all((piece.segments == number).all() for piece in ours)
    assert cut.train.rows_continue
    assert not one.train.rows_continue
    assert len(cut.valid) % 4 == 0
    if rule == "periodic":
        assert torch.equal(expected[0].tokens[:, 5:], expected[0].tokens[:, :-5])
    else:
        tokens, targets = expected[0].tokens - 5, expected[0].targets - 5
        marked = (tokens >= 8) & (tokens < 16)
        assert marked[:, :8].sum(1).tolist() == [1, 1, 1]
        assert (targets[:, -8:] == (tokens[marked] - 8)[:, None]).all()
        assert (expected[0].targets[:, :-8] == IGNORE_INDEX).all()
