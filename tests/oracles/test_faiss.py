"""Neighbours of faiss: its flat index finds what ours finds; codes in lists find most of it."""

from pathlib import Path

import numpy as np
import pytest
import torch

from manyformer.base.errors import UserError
from manyformer.inference.datastore import ExcludedRanges, FlatIndex, IVFPQIndex, make_index
from manyformer.inference.datastore.nearest_keys import KeyIndex, nearest_entries, with_distances

faiss = pytest.importorskip("faiss")
pytestmark = pytest.mark.oracle


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    faiss.omp_set_num_threads(1)


def keys_of(count: int, width: int) -> np.ndarray:
    """Clouds around a few centres, as the states of a model are."""
    random = np.random.default_rng(0)
    return (
        random.normal(size=(40, width))[random.integers(40, size=count)] + 0.3 * random.normal(size=(count, width))
    ).astype(np.float32)


def test_a_flat_index_finds_the_same_neighbours(tmp_path: Path) -> None:
    keys = keys_of(3000, 16)
    queries = torch.from_numpy(keys[::100]) + 0.05 * torch.randn(30, 16)
    plain = faiss.IndexFlatL2(16)
    plain.add(keys)
    distances, entries = plain.search(queries.numpy(), 20)
    ours = with_distances(keys, queries, nearest_entries(keys, queries, 20))
    assert np.array_equal(ours.entries, entries)
    np.testing.assert_allclose(ours.distances, distances, rtol=1e-3, atol=1e-4)
    make_index(keys, tmp_path / "index", FlatIndex())
    reference = with_distances(keys, queries, KeyIndex(tmp_path / "index", None).search(queries, 20))
    assert torch.equal(reference.entries, ours.entries)
    assert torch.equal(reference.distances, ours.distances)


def test_entries_that_do_not_count(tmp_path: Path) -> None:
    keys = keys_of(400, 8)
    make_index(keys, tmp_path / "index", FlatIndex())
    queries, begin = torch.from_numpy(keys[:5]), torch.tensor([0, 1, 2, 3, 0])
    for end in (begin + 30, torch.tensor([6, 300, 20, 399, 400])):
        ban = ExcludedRanges(begin[:, None], end[:, None])
        actual = with_distances(keys, queries, KeyIndex(tmp_path / "index", None).search(queries, 9, excluded=ban))
        expected = with_distances(keys, queries, nearest_entries(keys, queries, 9, excluded=ban))
        assert torch.equal(actual.entries, expected.entries)


def test_codes_in_lists_find_most_neighbours(tmp_path: Path) -> None:
    keys = keys_of(10_000, 16).astype(np.float16)
    queries = torch.from_numpy(keys[::250].astype(np.float32))
    make_index(keys, tmp_path / "index", IVFPQIndex(lists=16, codes=8))
    index = KeyIndex(tmp_path / "index", 8)
    assert index.kind == "IndexIVFPQ"
    expected = nearest_entries(keys, queries, 10)
    actual = index.search(queries, 10)
    hits = [len(set(a.tolist()) & set(b.tolist())) for a, b in zip(actual, expected)]
    assert np.mean(hits) > 6
    # whatever the codes say, distances are those of the keys
    exact = with_distances(keys, queries, actual)
    assert torch.equal(exact.distances[:, 0], torch.zeros(40))
    with pytest.raises(UserError, match=r"codes \(5\) must divide the width of the keys \(16\)"):
        make_index(keys, tmp_path / "other", IVFPQIndex(codes=5))
    with pytest.raises(UserError, match="quantization is trained on 9,984 keys or more, and there are 100; use flat"):
        make_index(keys[:100], tmp_path / "other", IVFPQIndex())
    assert not (tmp_path / "other").exists()
    (tmp_path / "cut").write_bytes(b"nothing")
    (tmp_path / "cut.json").write_text((tmp_path / "index.json").read_text())
    with pytest.raises(UserError, match="cut is damaged: it has 7 bytes instead of"):
        KeyIndex(tmp_path / "cut", None)
