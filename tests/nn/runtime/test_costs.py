"""Operations of attention are counted alike with every torch, also where heads share keys and values."""

import pytest
import torch
import torch.nn.functional as F

from manyformer.nn.runtime.costs import count_flops

ROWS, QUERIES, KEYS, WIDTH = 2, 6, 10, 8
PRODUCT = 2 * ROWS * 4 * QUERIES * KEYS * WIDTH
"""The operations of one product between the queries and the keys of four heads."""


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shared_keys_cost_what_keys_of_each_head_cost(kv_heads: int) -> None:
    q = torch.randn(ROWS, 4, QUERIES, WIDTH, requires_grad=True)
    k, v = (torch.randn(ROWS, kv_heads, KEYS, WIDTH, requires_grad=True) for _ in range(2))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    assert count_flops(forward) == 2 * PRODUCT
    # the scores once more, then the gradients of weights, values, queries and keys
    assert count_flops(lambda: forward().sum().backward()) == (2 + 5) * PRODUCT
