"""The loss and the logits of pairs against those of transformers' CLIP, given its embeddings."""

import math

import pytest
import torch

from manyformer.models.modalities_model import INITIAL_SCALE, pair_loss

transformers = pytest.importorskip("transformers", reason="pip install 'manyformer[hf]'")


def test_clips_own_loss_is_the_mean_of_ours() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 8, "patch_size": 4},
        projection_dim=12,
    )
    peer = transformers.CLIPModel(config).eval()
    images, tokens = torch.randn(6, 3, 8, 8), torch.randint(3, 20, (6, 8))
    with torch.no_grad():
        reference = peer(input_ids=tokens, pixel_values=images, return_loss=True)
        scale = peer.logit_scale.exp()
        logits = scale * reference.image_embeds @ reference.text_embeds.mT
        torch.testing.assert_close(logits, reference.logits_per_image)
        torch.testing.assert_close(logits.mT, reference.logits_per_text)
        torch.testing.assert_close(pair_loss(logits) / 6, reference.loss)
    assert float(peer.logit_scale.detach()) == pytest.approx(math.log(INITIAL_SCALE), abs=1e-4)
    torch.testing.assert_close(reference.image_embeds.norm(dim=-1), torch.ones(6))
