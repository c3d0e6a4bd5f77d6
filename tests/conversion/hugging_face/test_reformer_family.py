"""The Reformer of `transformers` and its import compute the same for texts of up to a chunk, and so do exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import exported, save_tiny

from manyformer.conversion.hugging_face import import_model

pytestmark = pytest.mark.oracle
CHUNK = 24
AXIAL = {"axial_pos_embds": True, "axial_pos_shape": [6, 8], "axial_pos_embds_dim": [12, 20]}
SIZES = {
    "is_decoder": True,
    "vocab_size": 40,
    "hidden_size": 32,
    "attention_head_size": 6,
    "num_attention_heads": 4,
    "feed_forward_size": 48,
    "attn_layers": ["local", "lsh"] * 2,
    "num_buckets": [2, 4],
    "lsh_attn_chunk_length": CHUNK,
    "local_attn_chunk_length": CHUNK,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
LEARNED = {"axial_pos_embds": False, "max_position_embeddings": 48}


def assert_same(theirs: Any, model: Any) -> None:
    tokens = torch.randint(3, 40, (3, CHUNK))
    segments = torch.where(torch.arange(CHUNK) < torch.tensor([CHUNK, 7, 15])[:, None], 0, -1)
    with torch.no_grad():
        expected, logits = theirs(tokens, attention_mask=segments + 1).logits, model(tokens, segments).logits
    torch.testing.assert_close(logits[segments == 0], expected[segments == 0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("positions", [AXIAL, LEARNED], ids=["axial", "learned"])
def test_the_same_logits_after_import_and_export(positions: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "theirs", "ReformerModelWithLMHead", {**SIZES, **positions})
    model = import_model(tmp_path / "theirs").model
    assert_same(reference, model)
    # versions before 5.24 have no bias of the output
    has_no_bias = reference.lm_head.decoder.bias is None
    exported(model, tmp_path / "ours", assert_same, unexpected="lm_head.decoder.bias" if has_no_bias else "nothing")
