"""The Reformer of `transformers` and its import compute the same for texts of up to a chunk, and so do exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import save_tiny

from manyformer.interop import export_model, import_model

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


@pytest.mark.parametrize("positions", [AXIAL, LEARNED], ids=["axial", "learned"])
def test_the_same_logits_after_import_and_export(positions: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    reference: Any = save_tiny(tmp_path / "theirs", "ReformerModelWithLMHead", {**SIZES, **positions})
    model = import_model(tmp_path / "theirs").model
    export_model(model, tmp_path / "ours")
    reformer: Any = transformers.ReformerModelWithLMHead
    back, loading = reformer.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not loading["missing_keys"]
    # versions before 5.24 have no bias of the output
    assert not loading["unexpected_keys"] - {"lm_head.decoder.bias"}
    assert ("lm_head.decoder.bias" in loading["unexpected_keys"]) == (reference.lm_head.decoder.bias is None)
    tokens = torch.randint(3, 40, (3, CHUNK))
    segments = torch.where(torch.arange(CHUNK) < torch.tensor([CHUNK, 7, 15])[:, None], 0, -1)
    with torch.no_grad():
        expected = reference(tokens, attention_mask=segments + 1).logits
        for logits in (model(tokens, segments).logits, back.eval()(tokens, attention_mask=segments + 1).logits):
            torch.testing.assert_close(logits[segments == 0], expected[segments == 0], atol=1e-4, rtol=0)
    again = import_model(tmp_path / "ours").model.state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())
