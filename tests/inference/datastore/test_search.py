"""Neighbours are those that comparing with everything finds."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import written

from manyformer.base.errors import UserError
from manyformer.inference.datastore import Datastore, ExcludedRanges, nearest_keys
from manyformer.inference.datastore.nearest_keys import nearest_entries, with_distances


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [1, 7, 60])
def test_neighbours_are_the_nearest(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, k: int) -> None:
    # blocks that do not divide the keys
    monkeypatch.setattr(nearest_keys, "KEYS_PER_BLOCK", 17)
    keys = np.random.default_rng(0).normal(size=(60, 5)).astype(np.float32)
    queries = torch.randn(9, 5, dtype=dtype)
    actual = with_distances(keys, queries, nearest_entries(keys, queries, k))
    expected = (queries[:, None] - torch.from_numpy(keys).to(dtype)).square().sum(-1).sort(1)
    assert (actual.entries == expected.indices[:, :k]).all()
    torch.testing.assert_close(actual.distances, expected.values[:, :k])


def test_entries_that_do_not_count_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nearest_keys, "KEYS_PER_BLOCK", 10)
    keys = np.arange(30, dtype=np.float32)[:, None]
    # the ranges of the second query are empty, those of the third one meet
    ban = ExcludedRanges(torch.tensor([[4, 0], [0, 3], [0, 10]]), torch.tensor([[7, 0], [0, 3], [10, 28]]))
    entries = nearest_entries(keys, torch.tensor([[5.2], [5.2], [5.2]]), 3, excluded=ban)
    assert entries.sort(1).values.tolist() == [[3, 7, 8], [4, 5, 6], [-1, 28, 29]]
    actual = with_distances(keys, torch.tensor([[5.2]] * 3), entries)
    assert actual.entries[2].tolist() == [28, 29, -1]
    assert actual.distances[2, 2] == torch.inf


def test_equal_distances_are_in_the_order_of_the_text() -> None:
    keys = np.zeros((4, 2), np.float32)
    actual = with_distances(keys, torch.ones(1, 2), torch.tensor([[3, 1, -1, 0]]))
    assert actual.entries.tolist() == [[0, 1, 3, -1]]
    assert actual.distances.tolist() == [[2.0, 2.0, 2.0, torch.inf]]


def test_entries_and_places_of_a_text(tmp_path: Path) -> None:
    texts = [[1, 10, 11, 2], [1, 2], [1, 20, 21, 22, 2]]
    store = written(tmp_path, np.zeros((8, 2), np.float32), texts)
    assert len(store) == 8
    every = np.arange(8)
    assert store.text_positions(every).tolist() == [0, 1, 2, 4, 6, 7, 8, 9]
    assert store.entries_at(store.text_positions(every)).tolist() == every.tolist()
    assert store.documents_of(every).tolist() == [0, 0, 0, 1, 2, 2, 2, 2]
    assert store.next_tokens(torch.tensor([[0, 2], [-1, 5]])).tolist() == [[10, 2], [-1, 21]]
    assert store.context(5, 3, 1) == ([1, 20], 21, [22])
    assert store.context(7, 2, 4) == ([21, 22], 2, [])


def test_keys_stay_on_the_disk(tmp_path: Path) -> None:
    width, entries = 64, 300_000
    text = [1, *[2] * entries]
    written(tmp_path, np.zeros((entries, width), np.float32), [text])
    # its files are compared with their sums once
    Datastore(tmp_path)
    tracemalloc.start()
    try:
        store = Datastore(tmp_path)
        opened = tracemalloc.get_traced_memory()[1]
        assert store.search(torch.zeros(2, width), 3).distances.tolist() == [[0.0] * 3] * 2
        searched = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert opened < 1e5
    assert searched < store.keys.nbytes / 3, "a block of keys at a time"


def test_more_neighbours_than_entries_are_refused(tmp_path: Path) -> None:
    store = written(tmp_path, np.zeros((3, 2), np.float32), [[1, 5, 6, 2]])
    with pytest.raises(UserError, match=r"neighbours \(4\) must be from 1 to 3, the entries of"):
        store.search(torch.zeros(1, 2), 4)
    assert store.load_settings().neighbours == 3
