"""Folders that cannot be imported: one sentence that names the file and what is wrong."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_encoders import CASES as ENCODERS
from tiny_foreign_models import saved
from tiny_models import save_tiny
from transformers import AutoConfig

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import export_model, import_model
from manyformer.conversion.hugging_face.families import family_of_type, model_types
from manyformer.conversion.hugging_face.hf_folder import HFConfig
from manyformer.conversion.hugging_face.model_import import read_text_settings

WEIGHTS, CONFIG, INDEX = "model.safetensors", "config.json", "model.safetensors.index.json"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("foreign") / "llama"
    saved("llama", path)
    return path


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change_config(folder: Path, **fields: Any) -> None:
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, **fields}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    change(weights)
    save_file(weights, folder / WEIGHTS)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"model_type": "lama"}, "no recipe equals models of type 'lama'; did you mean llama"),
        ({"model_type": None}, "has no model_type"),
        ({"hidden_size": "big"}, r"hidden_size \('big'\) must be a whole number from 1"),
        ({"hidden_size": 1 << 40}, r"hidden_size \(1099511627776\) must be a whole number"),
        ({"rms_norm_eps": -1}, r"rms_norm_eps \(-1\) must be a number of 0 or more"),
        ({"hidden_act": "relu6"}, r"hidden_act \('relu6'\) must be one of gelu, "),
        ({"attention_bias": 1}, r"attention_bias \(1\) must be true or false"),
        ({"mlp_bias": True}, "mlp_bias is True, and no recipe has that"),
        (
            {"rope_parameters": {"rope_type": "longrope"}},
            r"rope_type \('longrope'\) must be one of default, linear, llama3, yarn",
        ),
        ({"rope_parameters": [1]}, r"rope_parameters \(\[1\]\) must be an object"),
        ({"num_attention_heads": 3}, r"config\.json: heads \(3\) must be a multiple of kv_heads"),
        ({"vocab_size": 61}, r"model.embed_tokens.weight has the shape \(60, 32\), not \(61, 32\)"),
        ({"num_hidden_layers": 5}, "the weights lack the tensor model.layers.4"),
        ({"num_hidden_layers": 3}, "has the tensor model.layers.3.* no place"),
    ],
)
def test_settings(copy: Path, fields: dict[str, Any], sentence: str) -> None:
    change_config(copy, **fields)
    with pytest.raises(UserError, match=sentence):
        import_model(copy)


BERT_CLASSIFIER, VIT = "BertForSequenceClassification", "ViTForImageClassification"
OTHERS = {
    BERT_CLASSIFIER: ENCODERS[BERT_CLASSIFIER],
    VIT: {**SMALL, "image_size": [8, 12], "patch_size": 4},
    "XLNetLMHeadModel": {"d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 48, "attn_type": "uni"},
}
NO_PLACE = r"has the tensor classifier\.bias, for which the recipe bert has no place"


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (BERT_CLASSIFIER, {"architectures": ["BertModel"]}, NO_PLACE),
        (BERT_CLASSIFIER, {"architectures": ["BertForMultipleChoice"]}, "no head that the recipe has: ...ForMaskedLM"),
        (
            BERT_CLASSIFIER,
            {"problem_type": "regression"},
            "problem_type is 'regression', and heads .* choose one label",
        ),
        (BERT_CLASSIFIER, {"id2label": {"1": "a"}}, "id2label .* must be a name for each number from 0 on"),
        (BERT_CLASSIFIER, {"is_decoder": True}, "is_decoder is True"),
        (BERT_CLASSIFIER, {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        (BERT_CLASSIFIER, {"hidden_act": "silu"}, r"hidden_act \('silu'\) must be one of gelu"),
        (VIT, {"architectures": ["ViTForMaskedImageModeling"]}, "no head that the recipe has: ...ForImageClass"),
        (VIT, {"image_size": [8]}, r"image_size \(\[8\]\) must be the side of an image"),
        (VIT, {"image_size": 10}, "cannot be cut into patches"),
        (VIT, {"qkv_bias": False}, "qkv_bias is False, and no recipe has that"),
        ("XLNetLMHeadModel", {"attn_type": "bi"}, "attn_type is 'bi', and no recipe has XLNet's attention to both"),
        ("XLNetLMHeadModel", {"architectures": ["XLNetModel"]}, "architectures is .* and no recipe has that"),
        ("XLNetLMHeadModel", {"reuse_len": 3}, "reuse_len is 3, and no recipe has that"),
        ("XLNetLMHeadModel", {"d_head": 5}, "d_head is 5"),
    ],
)
def test_settings_of_other_families(name: str, fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, name, OTHERS[name])
    change_config(tmp_path, **fields)
    with pytest.raises(UserError, match=sentence):
        import_model(tmp_path)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"image_mean": [0, 0, 0], "image_std": [1, 1, 1]}, "are those of no pixel_scaling"),
        ({"do_rescale": False}, "do_rescale is False"),
    ],
)
def test_settings_of_pixels(fields: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    save_tiny(tmp_path, VIT, OTHERS[VIT])
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=sentence):
        import_model(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": NaN', "[" * 100_000])
def test_a_config_that_is_none(copy: Path, text: str) -> None:
    (copy / CONFIG).write_text(text)
    with pytest.raises(UserError, match=r"config\.json"):
        import_model(copy)


def test_tensors_that_are_missing_left_over_or_of_another_shape(copy: Path) -> None:
    change_weights(copy, lambda weights: weights.update({"model.extra": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"model\.safetensors has the tensor model\.extra, for which .* llama has no"):
        import_model(copy)
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(
        copy, lambda weights: (weights.pop("model.extra"), weights.update({name: weights[name].T.contiguous()}))
    )
    with pytest.raises(UserError, match=rf"{name} has the shape \(32, 48\), not \(48, 32\)"):
        import_model(copy)
    change_weights(copy, lambda weights: weights.pop(name))
    with pytest.raises(UserError, match=f"lack the tensor {name}"):
        import_model(copy)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("pytorch_model.bin", "a pickle, .* safe_serialization=True"), ("tf_model.h5", "TensorFlow"), ("x", "no weights")],
)
def test_other_weights(copy: Path, name: str, sentence: str) -> None:
    (copy / WEIGHTS).rename(copy / name)
    with pytest.raises(UserError, match=sentence):
        import_model(copy)


def test_damaged_weights(copy: Path) -> None:
    content = (copy / WEIGHTS).read_bytes()
    (copy / WEIGHTS).write_bytes(content[:1000])
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        import_model(copy)


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        ("[]", "weight_map must give a file"),
        ('{"weight_map": {"a": 3}}', "weight_map must give a file"),
        ('{"weight_map": {"a": "../../secret.safetensors"}}', "not the name of a safetensors file in its folder"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "not the name of a safetensors file in its folder"),
        ('{"weight_map": {"model.a": "gone.safetensors"}}', "a, for which"),
    ],
)
def test_indices(copy: Path, index: str, sentence: str) -> None:
    (copy / WEIGHTS).unlink()
    (copy / INDEX).write_text(index)
    with pytest.raises(UserError, match=sentence):
        import_model(copy)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    saved("llama", tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(UserError, match=f"{shard.name} is missing"):
        import_model(tmp_path)


@pytest.mark.parametrize(
    ("recipe", "keywords", "sentence"),
    [
        ("linear-transformer", {}, "no class of transformers equals the recipe linear-transformer"),
        ("transformer-lm", {"norm_order": "post"}, "norm_order is post, and a GPT-2 has pre alone"),
        ("transformer-lm", {"kernel": "favor"}, "kernel is favor, and a GPT-2 has softmax alone"),
        ("llama", {"window": 8, "sinks": 4}, "sinks is 4, which a MistralForCausalLM of these keywords does not have"),
        ("llama", {"qk_norm": True, "score_cap": 3.0}, "score_cap is 3.0, which a Qwen3ForCausalLM"),
        ("llama", {"rope_scaling": "ntk"}, "rope_scaling is ntk"),
        ("llama", {"removed_heads": "body.0.attention:1"}, "removed_heads is body.0.attention:1"),
    ],
)
def test_what_has_no_equal_class(recipe: str, keywords: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    model = mf.build(recipe, vocab=40, dim=32, depth=1, heads=4, **keywords)
    report = export_model(model, tmp_path / "out")
    assert report.architecture == "ManyformerForCausalLM"
    assert re.search(sentence, str(report.reason))
    assert mf.load(tmp_path / "out").spec == model.spec


TINY: dict[str, dict[str, Any]] = {
    "bert": {"vocab": 40, "norm_eps": 1e-4},
    "vit": {"classes": 2, "height": 8, "width": 8, "patch": 4},
    "transformer-xl": {"vocab": 40, "bias_sharing": "per-layer"},
}


@pytest.mark.parametrize(
    ("recipe", "keywords", "model_type", "sentence"),
    [
        ("bert", {}, "distilbert", "norm_eps is 0.0001, and a DistilBERT has 1e-12 alone"),
        ("bert", {"activation": "relu"}, "roberta", "activation is relu, and the head of a RoBERTa has gelu alone"),
        ("bert", {}, "berta", "no models of type 'berta' equal the recipe bert; did you mean"),
        (
            "bert",
            {"head": "classification", "classes": 2, "pooler_activation": "relu"},
            "bert",
            "pooler_activation is relu, and a Bert has tanh alone",
        ),
        ("vit", {"pool": "mean"}, "vit", "pool is mean, and a ViT has first alone"),
        ("vit", {"positions": "none"}, "vit", "positions is none"),
        ("vit", {}, "deit", "distillation_token is none, which a DeiT does not have"),
        ("vit", {"distillation_token": "read"}, "vit", "distillation_token is read, which a ViT does not have"),
        ("transformer-xl", {}, "xlnet", "scaled_embedding is True, and an XLNet has False alone"),
    ],
)
def test_a_class_that_is_asked_for_and_not_equal(
    recipe: str, keywords: dict[str, Any], model_type: str, sentence: str, tmp_path: Path
) -> None:
    model = mf.build(recipe, dim=8, depth=1, heads=2, **TINY[recipe], **keywords)
    with pytest.raises(UserError, match=sentence):
        export_model(model, tmp_path / "out", model_type=model_type)
    assert not (tmp_path / "out").exists()


WRONG_TYPES: tuple[Any, ...] = (None, "text", [], {}, [[]], [None], {"a": []}, -1, 0, True, False, 0.5, 1e308, 10**30)
ARCHITECTURES = {
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification",
    "perceiver": "PerceiverForMaskedLM",
    "xlnet": "XLNetLMHeadModel",
}
OLD_FIELDS = ("rope_scaling", "layer_types", "no_rope_layers", "mlp_layer_types", "problem_type", "bad_words_ids")


@pytest.mark.thinned(3)
@pytest.mark.parametrize("model_type", model_types())
def test_a_field_of_any_type_is_read_or_refused(model_type: str, tmp_path: Path) -> None:
    family, content = family_of_type(model_type), AutoConfig.for_model(model_type).to_dict()
    content |= {"architectures": [ARCHITECTURES.get(model_type, "SomeForMaskedLM")], "decoder_start_token_id": 0}
    content |= {"xlnet": {"attn_type": "uni"}, "reformer": {"is_decoder": True}}.get(model_type, {})
    refused = []
    for name in (*content.keys() - {"model_type"}, *OLD_FIELDS):
        for value in WRONG_TYPES:
            (tmp_path / CONFIG).write_text(json.dumps({**content, name: value}))
            config = HFConfig.read(tmp_path)
            try:
                read_text_settings(config, family, family.read_keywords(config))
            except UserError as error:
                refused.append(str(error))
    assert refused
    assert all(CONFIG in sentence for sentence in refused), refused


@pytest.mark.parametrize(
    ("model_type", "fields", "sentence"),
    [
        ("gpt2", {"activation_function": []}, r"activation_function \(\[\]\) must be one of gelu"),
        ("bert", {"hidden_act": {"a": 1}}, r"hidden_act \(\{'a': 1\}\) must be one of gelu"),
        ("qwen3_next", {"layer_types": [[]]}, r"layer_types \(\[\[\]\]\) must be a list of texts"),
        ("smollm3", {"no_rope_layers": "0101"}, r"no_rope_layers \('0101'\) must be a list of whole numbers"),
        ("llama", {"rope_scaling": 0, "rope_parameters": 0}, r"rope_parameters \(0\) must be an object"),
        ("gemma2", {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar \(0.0\) must be a number above 0"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(
    model_type: str, fields: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    content = {**AutoConfig.for_model(model_type).to_dict(), "architectures": ["BertForMaskedLM"], **fields}
    (tmp_path / CONFIG).write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf"config\.json: {sentence}"):
        family_of_type(model_type).read_keywords(HFConfig.read(tmp_path))


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"recipe": "lama", "keywords": {}}, r"config\.json: there is no recipe 'lama'; did you mean llama"),
        ({"recipe": None, "keywords": {}}, r"config\.json: manyformer\.recipe \(None\) must be the name of a recipe"),
        (
            {"recipe": "alibi", "keywords": {"deep": 1}},
            r"config\.json: alibi has no keyword 'deep'; did you mean depth",
        ),
        ({"recipe": "alibi", "keywords": [1]}, r"keywords \(\[1\]\) must be an object"),
        ({"recipe": "alibi", "keywords": {"vocab": 41, "dim": 32, "depth": 1}}, r"has the shape \(40, 32\), not"),
    ],
)
def test_a_config_of_ours_that_is_wrong(spec: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    export_model(mf.build("alibi", vocab=40, dim=32, depth=1, heads=4), tmp_path)
    change_config(tmp_path, manyformer=spec)
    with pytest.raises(UserError, match=sentence):
        mf.load(tmp_path)
