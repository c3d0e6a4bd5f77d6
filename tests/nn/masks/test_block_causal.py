"""The mask of block diffusion over a noisy copy beside its text, as the paper writes it, dense and in FlexAttention."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from manyformer.models.diffusion_lm import twice
from manyformer.models.embedding import positions_of
from manyformer.nn.core import PADDING_SEGMENT, TokenPositions
from manyformer.nn.masks import BlockCausal, Causal
from manyformer.nn.ops.softmax_attention import fused_attention
from manyformer.nn.softmax.flex_attention import flex_mask_attention

LENGTH = 11


def positions(segments: list[list[int]]) -> TokenPositions:
    ids = torch.tensor(segments)
    return positions_of(torch.zeros_like(ids), ids, None)[0]


def as_published(size: int) -> Tensor:
    """M_BD, M_OBC and M_BC of appendix B over [x_t; x], by two loops."""

    def sees(i: int, j: int) -> bool:
        query_is_noisy, key_is_noisy = i < LENGTH, j < LENGTH
        query_block, key_block = i % LENGTH // size, j % LENGTH // size
        block_diagonal = query_block == key_block and query_is_noisy == key_is_noisy
        offset_block_causal = query_block > key_block and query_is_noisy and not key_is_noisy
        block_causal = query_block >= key_block and not query_is_noisy and not key_is_noisy
        return block_diagonal or offset_block_causal or block_causal

    return torch.tensor([[sees(i, j) for j in range(2 * LENGTH)] for i in range(2 * LENGTH)])


@pytest.mark.parametrize("size", [1, 3, 4, 11, 20])
def test_both_halves_see_what_the_paper_says(size: int) -> None:
    both = twice(positions([[0] * LENGTH]))
    assert_close(BlockCausal(size).dense(both, both, 1)[0, 0], as_published(size))


def test_blocks_begin_with_their_document_and_size_one_is_causal() -> None:
    place = positions([[0] * 6 + [1] * 5, [PADDING_SEGMENT] * 2 + [0] * 7 + [PADDING_SEGMENT] * 2])
    dense = BlockCausal(4).dense(place, place, 1)
    assert dense[0, 0, 4].tolist() == [True] * 6 + [False] * 5
    assert dense[0, 0, 7].tolist() == [False] * 6 + [True] * 4 + [False]
    assert dense[1, 0, 2].tolist() == [False] * 2 + [True] * 4 + [False] * 5
    assert_close(BlockCausal(1).dense(place, place, 1), Causal().dense(place, place, 1))
    with pytest.raises(ValueError, match=r"BlockCausal\(0\): size must be at least 1"):
        BlockCausal(0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("size", [1, 4, 64])
def test_flex_attention_computes_the_dense_mask(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    place = positions([[0] * 90 + [1] * 53, [0] * 100 + [PADDING_SEGMENT] * 43])
    both = twice(place)
    q, k, v = torch.randn(3, 2, 2, 286, 8, generator=generator)
    mask = BlockCausal(size)
    flex = flex_mask_attention(q, k, v, mask, both, both, scale=0.3)
    dense = mask.dense(both, both, 2)
    is_token = (both.segment_ids != PADDING_SEGMENT)[:, None, :, None]
    expected = fused_attention(q, k, v, dense, causal=False, scale=0.3, dropout=0.0)
    assert_close(flex * is_token, expected.nan_to_num() * is_token, rtol=1e-5, atol=1e-6)
