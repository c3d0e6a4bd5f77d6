"""A family from outside the package, in one short file: Seed-OSS, a Llama with biases of queries, keys and values."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_foreign_models import SIZES, VOCAB
from tiny_models import exported, save_tiny

from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import export_model, families, import_model
from manyformer.conversion.hugging_face import families as rules
from manyformer.conversion.hugging_face.families import TensorRule
from manyformer.conversion.hugging_face.families.decoder_parts import (
    attention_rules,
    decoder_family,
    gated_rules,
    head_dim,
    kv_heads,
    plain_rotary,
)
from manyformer.conversion.hugging_face.families.llama import PLAIN

pytestmark = pytest.mark.oracle


def layer(hf: str, ours: str, number: int, keywords: Mapping[str, Any]) -> Iterator[TensorRule]:
    yield from attention_rules(f"{hf}.self_attn", f"{ours}.attention.inner", keywords, biases="qkv")
    yield from gated_rules(f"{hf}.mlp", f"{ours}.ff.inner")


SEED_OSS = decoder_family(
    title="Seed-OSS",
    classes={"seed_oss": "SeedOssForCausalLM"},
    recipe="llama",
    norm_eps=1e-6,
    config_rules=(
        rules.demanded("a SeedOssForCausalLM", **{**PLAIN, "biases": "qkv", "rope_scaling": "none"}),
        rules.implied(biases="qkv"),
        rules.fixed(attention_bias=True, attention_out_bias=False, mlp_bias=False),
        kv_heads(default=8),
        head_dim(lambda config: config.size("head_dim", 128)),
        rules.size("intermediate_size", "ff_dim"),
        rules.number("residual_dropout", "dropout", 0.1),
        plain_rotary(),
    ),
    layer=layer,
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_registered", {})
    families.register_family(SEED_OSS)


def assert_same(hf: Any, model: Any) -> None:
    tokens = torch.randint(0, VOCAB, (2, 17))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, hf(tokens).logits, atol=1e-4, rtol=0)


def test_a_registered_family_is_read_and_written(tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "theirs", "SeedOssForCausalLM", {**SIZES, "head_dim": 12})
    model, report = import_model(tmp_path / "theirs")
    assert (report.family, report.recipe, report.keywords["biases"]) == ("Seed-OSS", "llama", "qkv")
    assert_same(reference, model)
    assert type(exported(model, tmp_path / "ours", assert_same, model_type="seed_oss")) is type(reference)


def test_a_registered_family_refuses_what_its_recipe_does_not_have(tmp_path: Path) -> None:
    save_tiny(tmp_path, "SeedOssForCausalLM", {**SIZES, "head_dim": 12})
    content = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "attention_out_bias": True}))
    with pytest.raises(UserError, match="attention_out_bias is True, and no recipe has that"):
        import_model(tmp_path)


def test_families_of_the_package_come_first_in_exports(tmp_path: Path) -> None:
    save_tiny(tmp_path / "theirs", "SeedOssForCausalLM", {**SIZES, "head_dim": 12})
    report = export_model(import_model(tmp_path / "theirs").model, tmp_path / "ours")
    assert report.architecture == "Qwen2ForCausalLM"


def test_a_type_of_the_package_is_not_taken_over() -> None:
    with pytest.raises(ValueError, match="models of type 'gpt2' have a family already"):
        families.register_family(replace(SEED_OSS, model_types=("gpt2",)))


def test_each_type_is_listed_with_the_file_of_its_family() -> None:
    for model_type in families.model_types():
        assert model_type in families.family_of_type(model_type).model_types
    listed = [model_type for family in families.all_families() for model_type in family.model_types]
    assert sorted(listed) == sorted(families.model_types())
