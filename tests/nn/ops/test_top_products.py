"""The nearest keys are those of torch's own selection, however keys and queries are cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyformer.nn.ops import top_products as module
from manyformer.nn.ops.top_products import top_products, top_products_reference


def same(q: Tensor, k: Tensor, count: int, hidden: Tensor | None = None) -> None:
    actual, expected = top_products(q, k, count, hidden), top_products_reference(q, k, count, hidden)
    torch.testing.assert_close(actual.products, expected.products, atol=1e-12, rtol=0)
    # of equal products any may be chosen, but each number once, and with its own product
    assert actual.columns.shape == expected.columns.shape
    assert all(len(set(row)) == len(row) for row in actual.columns.flatten(0, 1).tolist())
    own = (q @ k.mT).gather(-1, actual.columns)
    if hidden is not None:
        own = own.masked_fill(hidden.expand(len(q), -1, -1).gather(-1, actual.columns), -torch.inf)
    torch.testing.assert_close(own, actual.products, atol=1e-12, rtol=0)


@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 700), st.integers(1, 12), st.integers(1, 6000), st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_the_nearest_are_those_of_the_definition(
    pairs: int, queries: int, keys: int, count: int, limit: int, masked: bool
) -> None:
    torch.manual_seed(pairs * keys)
    q, k = (torch.randn(pairs, n, 3, dtype=torch.float64) for n in (queries, keys))
    hidden = torch.rand(queries, keys) < 0.7 if masked else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(module.PRODUCTS_PER_BLOCK, "cpu", limit)
        same(q, k, count, hidden)


def test_equal_products_do_no_harm() -> None:
    """All in one group, all in different ones, and whole numbers, of which many are equal."""
    q = torch.ones(1, 1, 1, dtype=torch.float64)
    for best in (range(0, 4096, 512), range(100, 108), [*range(4088, 4096)]):
        k = torch.zeros(1, 4096, 1, dtype=torch.float64)
        k[0, list(best), 0] = torch.arange(1.0, 9.0, dtype=torch.float64)
        assert top_products(q, k, 8).columns.flatten().sort().values.tolist() == list(best)
    k = torch.randint(0, 3, (2, 1000, 2), dtype=torch.float64)
    same(torch.randint(0, 3, (2, 5, 2), dtype=torch.float64), k, 7)


@pytest.mark.parametrize(("queries", "keys"), [(3, 0), (0, 9), (3, 2)])
def test_fewer_keys_than_are_asked_for_and_no_queries(queries: int, keys: int) -> None:
    same(torch.randn(2, queries, 4).double(), torch.randn(2, keys, 4).double(), 5)
    assert top_products(torch.randn(2, queries, 4), torch.randn(2, keys, 4), 5).columns.shape[-1] == min(keys, 5)
