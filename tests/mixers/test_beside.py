"""Layers beside each other are one layer with the heads of both."""

import torch

from manyformer.attention import Attention
from manyformer.core import Context
from manyformer.kernels import Softmax
from manyformer.masks import Causal
from manyformer.mixers import Beside
from manyformer.models.places import locate


def test_heads_beside_each_other_are_one_attention() -> None:
    whole = Attention(12, 3, Softmax(Causal()), bias=False)
    one, two = (Attention(12, heads, Softmax(Causal()), key=4, value=4, bias=False) for heads in (1, 2))
    with torch.no_grad():
        for part, rows in ((one, slice(0, 4)), (two, slice(4, 12))):
            part.to_q.weight.copy_(whole.to_q.weight[rows])
            keys, values = whole.to_kv.weight.chunk(2)
            part.to_kv.weight.copy_(torch.cat([keys[rows], values[rows]]))
            part.out.weight.copy_(whole.out.weight[:, rows])
    both = Beside(one=one, two=two)
    tokens = torch.zeros(2, 7, dtype=torch.long)
    x, ctx = torch.randn(2, 7, 12), Context(locate(tokens, None, None)[0])
    torch.testing.assert_close(both(x, ctx).y, whole(x, ctx).y)
    state = both.start(2, device=x.device, dtype=x.dtype)
    y, state, _ = both(x, ctx, state)
    assert [kept.source.length for kept in state] == [7, 7]
    torch.testing.assert_close(y, whole(x, ctx).y)
