"""The picture of a leak, as `check` measures it: attention over blocks whose mask knows blocks alone."""

import torch
from torch import Tensor, nn

import manyformer as mf
from manyformer.analysis.contracts.report_page import matrix_svg

WIDTH = 16
BLOCK = 4
VOCABULARY = 64


class BlockAttention(nn.Module):
    """Each block attends to the first block, the one before and itself, as in BigBird, without a mask within blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        blocks = torch.arange(x.shape[1]) // BLOCK
        distance = blocks[:, None] - blocks
        visible = (distance == 0) | (distance == 1) | ((blocks == 0) & (distance > 0))
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)


class Decoder(nn.Module):
    """A decoder of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = BlockAttention()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.attention(x))


def leak_picture() -> str:
    """The matrix of which outputs depend on which tokens, as SVG."""
    torch.manual_seed(0)
    report = mf.check(Decoder(), only=["causal"], length=24, vocabulary=VOCABULARY)
    place = report["causal"].place
    assert place is not None
    assert place.matrix is not None
    return matrix_svg(place.matrix, standalone=True) + "\n"
