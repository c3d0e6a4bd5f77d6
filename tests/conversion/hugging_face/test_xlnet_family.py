"""XLNet in one direction and its import compute the same, with padding on the left and a memory, and so do exports."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import exported, save_tiny

from manyformer.conversion.hugging_face import import_model

pytestmark = pytest.mark.oracle

VOCAB, LENGTH, TOLERANCE = 60, 24, 1e-4
SIZES = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "n_layer": 2,
    "n_head": 4,
    "d_inner": 48,
    "attn_type": "uni",
    "mem_len": None,
}


def assert_same(theirs: Any, model: Any) -> None:
    tokens = torch.randint(0, VOCAB, (3, LENGTH))
    is_token = torch.arange(LENGTH) >= torch.tensor([0, 17, 9])[:, None]
    with torch.no_grad():
        # in one direction, theirs takes a mask for one row only
        rows = zip(tokens.split(1), is_token.float().split(1), strict=True)
        expected = torch.cat([theirs(row, attention_mask=mask).logits for row, mask in rows])
        logits = model(tokens, is_token.long() - 1).logits
    torch.testing.assert_close(logits[is_token], expected[is_token], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("settings", [{}, {"mem_len": 7}, {"ff_activation": "relu", "clamp_len": 5}])
def test_the_same_logits_after_import_and_export(settings: dict[str, Any], tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "theirs", "XLNetLMHeadModel", {**SIZES, **settings})
    model, report = import_model(tmp_path / "theirs")
    assert all(any(part in name for part in ("mask_emb", "r_s_bias", "seg_embed")) for name in report.left_out)
    assert_same(reference, model)
    tokens = torch.randint(0, VOCAB, (2, LENGTH))
    state, memories = model.init_state(2), None
    for piece in torch.split(tokens, [9, 5, 5, 5], dim=1):
        with torch.no_grad():
            expected = reference(piece, mems=memories, use_mems=True)
            memories = expected.mems
            logits, state, _ = model(piece, state=state)
        torch.testing.assert_close(logits, expected.logits, atol=TOLERANCE, rtol=0)
    exported(model, tmp_path / "ours", assert_same, missing="")
