"""labml's attention reconstruction loss is ours: the same number, the same gradient for the compression.

It is compared where it is installed, as in `.ci/run`; its own requirements exclude those of other peers.
"""

from typing import Any

import pytest
import torch
from torch import nn

from manyformer.nn import Attention, SoftmaxKernel
from manyformer.nn.attention.compressive_attention import (
    AttentionReconstructionLoss,
    ConvolutionCompression,
    MemorySlots,
)
from manyformer.nn.attention.kv_cache import PrefixSource
from manyformer.nn.masks import Causal
from manyformer.nn.positions import TransformerXLPosition

pytestmark = pytest.mark.oracle

WHY = "labml-nn is not installed: pip install --no-deps labml labml-helpers labml-nn"

DIM, HEADS, RATE = 12, 3, 2


def theirs() -> Any:
    module = pytest.importorskip("labml_nn.transformers.compressive", reason=WHY)
    relative = pytest.importorskip("labml_nn.transformers.xl.relative_mha", reason=WHY)
    attention = relative.RelativeMultiHeadAttention(HEADS, DIM, 0.0)
    compress = module.Conv1dCompression(RATE, DIM)
    layer = module.CompressiveTransformerLayer(
        d_model=DIM, self_attn=attention, feed_forward=nn.Identity(), dropout_prob=0.0, compress=compress
    ).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.4)
    return layer, module.AttentionReconstructionLoss(nn.ModuleList([layer]))


def ours(layer: Any) -> tuple[Attention, ConvolutionCompression]:
    """Their keys have no bias, their values and queries do; by content alone their positions do not matter."""
    words: dict[str, Any] = {
        "position": TransformerXLPosition(DIM, HEADS),
        "source": PrefixSource(),
        "pre_norm": nn.LayerNorm(DIM),
    }
    mine, compression = (
        Attention(DIM, HEADS, SoftmaxKernel(Causal()), **words).double(),
        ConvolutionCompression(DIM, RATE).double(),
    )
    their = layer.self_attn
    state = dict(mine.state_dict())
    state |= {f"pre_norm.{name}": value for name, value in layer.norm_self_attn.state_dict().items()}
    for name, part in (("q_proj", [their.query]), ("kv_proj", [their.key, their.value])):
        state[f"{name}.weight"] = torch.cat([one.linear.weight for one in part])
        state[f"{name}.bias"] = torch.cat(
            [torch.zeros(DIM).double() if one.linear.bias is None else one.linear.bias for one in part]
        )
    mine.load_state_dict(state)
    compression.conv.load_state_dict(layer.compress.conv.state_dict())
    return mine, compression


def test_attention_reconstruction() -> None:
    torch.manual_seed(0)
    layer, loss = theirs()
    attention, compression = ours(layer)
    # theirs has the sequence first
    at, memory = (torch.randn(n, 2, DIM, dtype=torch.float64) for n in (5, 8))
    expected = loss.calc_loss(layer, at, memory)
    zeros = (torch.zeros(2, n, dtype=torch.long) for n in (5, 8))
    here, old = (MemorySlots(x.transpose(0, 1), seg) for x, seg in zip((at, memory), zeros))
    actual = AttentionReconstructionLoss()(attention, here, old, compression(old))
    assert isinstance(actual, torch.Tensor)
    torch.testing.assert_close(actual, expected, atol=1e-10, rtol=0)
    mine = torch.autograd.grad(actual, list(compression.conv.parameters()))
    other = torch.autograd.grad(expected, list(layer.compress.conv.parameters()))
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, atol=1e-10, rtol=0)
