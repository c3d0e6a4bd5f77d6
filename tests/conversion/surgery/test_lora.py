"""Low-rank adapters against those of peft, on the same weights; and what is refused."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import LoraConfig
from manyformer.conversion.surgery.lora import LoraLinear, attach_lora, merge_lora

SIZES: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 2, "heads": 2, "max_length": 8}
PARTS = ("q_proj", "kv_proj", "out_proj", "up", "down")
TOKENS = torch.arange(16).view(2, 8) % 11


def encoder() -> Any:
    torch.manual_seed(1)
    return mf.build("bert", **SIZES, head="classification", classes=3).double().eval()


def adapted(parts: tuple[str, ...] = PARTS, *, drawn: bool = True) -> Any:
    model = encoder()
    attach_lora(model, LoraConfig(rank=2, alpha=6, parts=parts))
    for layer in model.modules():
        if drawn and isinstance(layer, LoraLinear):
            nn.init.normal_(layer.lora_b, std=0.1)
    return model.eval()


def test_nothing_changes_at_first_and_nothing_is_lost_in_the_merge() -> None:
    plain, fresh, trained = encoder(), adapted(drawn=False), adapted()
    assert torch.equal(fresh(TOKENS).logits, plain(TOKENS).logits)
    outputs = trained(TOKENS).logits
    assert (outputs - plain(TOKENS).logits).abs().max() > 1e-2
    merge_lora(trained)
    assert trained.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(trained(TOKENS).logits, outputs, rtol=0, atol=1e-10)


def test_outputs_and_gradients_are_those_of_peft() -> None:
    """A matrix of keys and values has two adapters here, which is one of peft of twice the rank with B in blocks."""
    peft = pytest.importorskip("peft", reason="the oracle needs the package peft")
    ours = adapted()
    layers = {name: layer for name, layer in ours.named_modules() if isinstance(layer, LoraLinear)}
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=list(layers), rank_pattern={"kv_proj": 4})
    config.alpha_pattern = {"kv_proj": 12}
    reference = peft.inject_adapter_in_model(config, encoder()).eval()
    for name, layer in layers.items():
        other = reference.get_submodule(name)
        with torch.no_grad():
            other.lora_A["default"].weight.copy_(layer.lora_a)
            other.lora_B["default"].weight.copy_(torch.block_diag(*layer.lora_b.split(layer.sizes)))
    outputs = [model(TOKENS).logits for model in (ours, reference)]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-10)
    for logits in outputs:
        logits.square().sum().backward()
    for name, layer in layers.items():
        other = reference.get_submodule(name)
        torch.testing.assert_close(layer.lora_a.grad, other.lora_A["default"].weight.grad)
        blocks = zip(other.lora_B["default"].weight.grad.split(layer.sizes), range(len(layer.sizes)), strict=True)
        expected = torch.cat([block[:, 2 * number : 2 * number + 2] for block, number in blocks])
        torch.testing.assert_close(layer.lora_b.grad, expected)


def test_only_adapters_and_head_are_trained() -> None:
    model = adapted(("body.1.*", "q_proj"))
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or name.startswith("head.") for name in trained)
    assert {name for name in trained if name.startswith("body.0.")} == {
        name for name in trained if name.startswith("body.0.") and ".q_proj.lora_" in name
    }
    assert any(".kv_proj.lora_" in name for name in trained if name.startswith("body.1."))
    assert all(name in trained for name, _ in model.named_parameters() if name.startswith("head."))


def test_a_tied_head_is_frozen_with_the_embedding() -> None:
    model: Any = mf.build("bert", **SIZES)
    attach_lora(model, LoraConfig(rank=2))
    assert any(weight.requires_grad for weight in model.head.parameters())
    assert not any(weight.requires_grad for weight in model.embed.parameters())


def test_layers_that_read_their_matrices_get_the_merged_ones() -> None:
    """Longformer's attention of global tokens computes with the matrix of keys and values itself."""
    model: Any = mf.build("longformer", **SIZES, window=2, head="classification", classes=3).double().eval()
    attach_lora(model, LoraConfig(rank=2, parts=("global_kv_proj",)))
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.lora_b, std=0.5)
    outputs, merged = model(TOKENS).logits, copy.deepcopy(model)
    merge_lora(merged)
    torch.testing.assert_close(merged(TOKENS).logits, outputs, rtol=0, atol=1e-10)


def test_parts_without_a_layer_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"lora.parts: no trained linear layer below the head is named 'v_proj'; did you"
    ):
        attach_lora(encoder(), LoraConfig(rank=2, parts=("v_proj",)))
