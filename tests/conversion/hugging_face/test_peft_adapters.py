"""Adapters that peft wrote, merged into imported models: the logits are those of peft's model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import import_model

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

TOKENS = torch.arange(2 * 9).view(2, 9) % 37
SIZES = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def make_gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


def make_llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=1))


def make_bert() -> Any:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=3))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt2": (make_gpt2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "llama": (make_llama, {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True, "lora_alpha": 3}),
    "ranks": (make_llama, {"target_modules": ["q_proj", "o_proj"], "rank_pattern": {"o_proj": 2}}),
    "bert": (make_bert, {"target_modules": ["query", "value"], "task_type": "SEQ_CLS", "bias": "all"}),
}


def write_adapters(name: str, folder: Path) -> Any:
    """Write a model and its adapters; returns peft's model with both."""
    torch.manual_seed(0)
    make_model, options = CASES[name]
    model = make_model()
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, **options)).eval()
    with torch.no_grad():
        for weight in adapted.parameters():
            if weight.requires_grad:
                weight.add_(0.3 * torch.randn_like(weight))
    adapted.save_pretrained(folder / "adapters")
    return adapted


@pytest.mark.parametrize("name", CASES)
def test_merged_adapters_compute_what_peft_computes(name: str, tmp_path: Path) -> None:
    adapted = write_adapters(name, tmp_path)
    ours: Any = import_model(tmp_path / "adapters", base=tmp_path / "base").model
    plain: Any = import_model(tmp_path / "base").model
    with torch.no_grad():
        expected = adapted(input_ids=TOKENS).logits
        torch.testing.assert_close(ours(TOKENS).logits, expected, atol=1e-4, rtol=1e-4)
        assert (plain(TOKENS).logits - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("setting", "value", "reason"),
    [
        ("use_dora", True, "use_dora is True"),
        ("peft_type", "IA3", "peft_type is 'IA3'"),
        ("lora_alpha", "x", "lora_alpha"),
        ("init_lora_weights", "pissa_niter_4", "init_lora_weights is 'pissa_niter_4'"),
        ("init_lora_weights", "olora", "init_lora_weights is 'olora'"),
        ("alora_invocation_tokens", [1, 2], r"alora_invocation_tokens is \[1, 2\]"),
        ("r", 2, r"down_proj has rank 4, and r and rank_pattern in adapter_config.json say 2"),
        ("rank_pattern", {"q_proj": 2}, r"q_proj has rank 4, and r and rank_pattern in adapter_config.json say 2"),
        ("rank_pattern", {"q_proj": "2"}, "q_proj"),
        ("modules_to_save", ["lm_head"], "modules_to_save names lm_head, and .* does not have lm_head.weight"),
    ],
)
def test_adapters_of_another_kind_are_refused(setting: str, value: Any, reason: str, tmp_path: Path) -> None:
    write_adapters("llama", tmp_path)
    file = tmp_path / "adapters" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: value}))
    with pytest.raises(UserError, match=reason):
        import_model(tmp_path / "adapters", base=tmp_path / "base")


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:`init_lora_weights` is 'eva':UserWarning")
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("init_lora_weights", "eva"),
        ("init_lora_weights", "orthogonal"),
        ("target_parameters", []),
        ("modules_to_save", ["score"]),
        ("rank_pattern", {"model.layers.7.self_attn.q_proj": 2}),
        ("rank_pattern", {r"layers\.[7-9]\..*": 2}),
    ],
)
def test_settings_that_change_nothing_for_peft_are_no_reason_to_refuse(
    setting: str, value: Any, tmp_path: Path
) -> None:
    write_adapters("llama", tmp_path)
    file = tmp_path / "adapters" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {setting: value}))
    base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base")
    read = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")).eval()
    ours: Any = import_model(tmp_path / "adapters", base=tmp_path / "base").model
    with torch.no_grad():
        torch.testing.assert_close(ours(TOKENS).logits, read(input_ids=TOKENS).logits, atol=1e-4, rtol=1e-4)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    write_adapters("llama", tmp_path)
    with pytest.raises(UserError, match="holds adapters, no model: give the folder of the model as base"):
        import_model(tmp_path / "adapters")
    with pytest.raises(UserError, match="holds no adapters"):
        import_model(tmp_path / "base", base=tmp_path / "base")
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    tensors = load_file(file)
    first = sorted(tensors)[0]
    save_file({**tensors, first: tensors[first][:, 1:].contiguous()}, file)
    with pytest.raises(UserError, match=r"adapters of model.layers.0.mlp.down_proj.weight, .* do not fit its shape"):
        import_model(tmp_path / "adapters", base=tmp_path / "base")
    save_file({**tensors, "base_model.model.other.lora_A.weight": tensors[first].clone()}, file)
    with pytest.raises(UserError, match=r"has an adapter or a tensor for other|other.lora_B.weight is missing"):
        import_model(tmp_path / "adapters", base=tmp_path / "base")
    save_file({name: value for name, value in tensors.items() if name != first}, file)
    with pytest.raises(UserError, match=r"lora_A|has an adapter or a tensor for"):
        import_model(tmp_path / "adapters", base=tmp_path / "base")
    file.write_bytes(b"x" * 40)
    with pytest.raises(UserError, match=r"adapter_model.safetensors is damaged"):
        import_model(tmp_path / "adapters", base=tmp_path / "base")
    file.unlink()
    (tmp_path / "adapters" / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"is missing .adapter_model.bin is a pickle"):
        import_model(tmp_path / "adapters", base=tmp_path / "base")
