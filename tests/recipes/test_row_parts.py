"""What fused matrices say of their parts: sizes that are those of the separate matrices."""

import pytest
import torch

import manyformer as mf
from manyformer.config import LoraConfig
from manyformer.conversion.surgery.lora import LoraLinear, attach_lora
from manyformer.nn.runtime.training_hooks import fused_row_parts

SIZES = {"vocab": 11, "dim": 16, "depth": 1, "heads": 4}


@pytest.mark.parametrize(
    ("recipe", "keywords", "name", "rows"),
    [
        # two heads of keys and of values of width 4
        ("llama", {"kv_heads": 2}, "body.0.attention.inner.kv_proj.weight", (8, 8)),
        # one head of keys, four of values that are 8 wide
        ("gated-deltanet", {"key_heads": 1, "value_dim": 8}, "body.0.attention.inner.kv_proj.weight", (4, 32)),
        # 32 channels, and as many gates; steps, then what is written and read
        ("mamba", {"heads": None, "state_dim": 3}, "body.0.mixer.inner.in_proj.weight", (32, 32)),
        ("mamba", {"heads": None, "state_dim": 3}, "body.0.mixer.inner.x_proj.weight", (1, 3, 3)),
        ("compose", {"gate": "gru"}, "body.0.attention.join.branch_weight", (16, 16, 16)),
        ("compose", {"gate": "gru"}, "body.0.attention.join.stream_weight", (16, 16)),
    ],
)
def test_the_parts_are_those_of_the_separate_matrices(
    recipe: str, keywords: dict[str, object], name: str, rows: tuple[int, ...]
) -> None:
    chosen = {key: value for key, value in {**SIZES, **keywords}.items() if value is not None}
    assert fused_row_parts(mf.build(recipe, **chosen))[name] == rows


def test_adapters_of_shared_keys_have_the_widths_of_keys_and_values() -> None:
    model = mf.build("gated-deltanet", **SIZES, key_heads=1, value_dim=8)
    attach_lora(model, LoraConfig(rank=2, parts=("kv_proj",)))
    (adapter,) = (module for module in model.modules() if isinstance(module, LoraLinear))
    assert adapter.sizes == [4, 32]
    assert model(torch.zeros(1, 3, dtype=torch.long)).logits.isfinite().all()
    assert "body.0.attention.inner.kv_proj.weight" not in fused_row_parts(model)
