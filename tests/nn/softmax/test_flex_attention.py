"""What is asked of FlexAttention's kernel beside its definition."""

import pytest
import torch

from manyformer.nn.softmax import flex_attention


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_term_for_each_distance_leaves_room_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # with the three stages of bfloat16 on Hopper, 240 KiB were asked of 227 and no ALiBi or T5 bias compiled
    taken: list[dict[str, object]] = []
    flex = flex_attention.flex_attention

    def record(*tensors: torch.Tensor, **options: object) -> object:
        taken.append(options)
        return flex(*tensors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(flex_attention, "flex_attention", record)
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    scores = flex_attention.score_mod(torch.zeros(1, 2, 1, 5), 2, 2, 0)
    for modify in (scores, None):
        flex_attention.fused_flex_attention(q, k, v, block_mask=None, scale=1.0, score_mod=modify)
    assert [options.get("kernel_options") for options in taken] == [{"num_stages": 2}, None]
