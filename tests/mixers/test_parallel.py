"""Layers beside each other are one layer with the heads of both."""

import torch

from manyformer.attention import Attention
from manyformer.core import Context
from manyformer.kernels import SoftmaxKernel
from manyformer.masks import Causal
from manyformer.mixers import ParallelLayers
from manyformer.models.embedding import positions_of


def test_heads_beside_each_other_are_one_attention() -> None:
    full = Attention(12, 3, SoftmaxKernel(Causal()), bias=False)
    one, two = (Attention(12, heads, SoftmaxKernel(Causal()), head_dim=4, value_dim=4, bias=False) for heads in (1, 2))
    with torch.no_grad():
        for part, rows in ((one, slice(0, 4)), (two, slice(4, 12))):
            part.q_proj.weight.copy_(full.q_proj.weight[rows])
            keys, values = full.kv_proj.weight.chunk(2)
            part.kv_proj.weight.copy_(torch.cat([keys[rows], values[rows]]))
            part.out_proj.weight.copy_(full.out_proj.weight[:, rows])
    both = ParallelLayers(one=one, two=two)
    tokens = torch.zeros(2, 7, dtype=torch.long)
    x, ctx = torch.randn(2, 7, 12), Context(positions_of(tokens, None, None)[0])
    torch.testing.assert_close(both(x, ctx).y, full(x, ctx).y)
    state = both.init_state(2, device=x.device, dtype=x.dtype)
    y, state, _ = both(x, ctx, state)
    assert [kept.source.length for kept in state] == [7, 7]
    torch.testing.assert_close(y, full(x, ctx).y)
