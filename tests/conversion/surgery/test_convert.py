"""Conversions: what is equal stays equal, what is derived is what the papers say, and nothing is left unexplained."""

from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.surgery import CONVERSIONS, ConvertedModel
from manyformer.models import Model

SIZES: dict[str, Any] = {"vocab": 40, "dim": 32, "depth": 2, "heads": 4}
TOKENS = torch.arange(2 * 12).view(2, 12) % 40


def build(recipe: str, **keywords: Any) -> Model:
    """A model whose weights are all random, also those that begin as 0 or 1."""
    model = mf.build(recipe, **{**SIZES, "dropout": 0.0, **keywords}).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def kinds(converted: ConvertedModel) -> set[str]:
    return {origin.kind for origin in converted.report.origins}


def logits(model: Model, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return model(tokens).logits.detach()


@pytest.mark.parametrize(
    ("recipe", "old", "new"),
    [
        ("transformer-lm", {"max_length": 16}, {"max_length": 64}),
        ("transformer-lm", {}, {"kernel": "window", "window": 12}),
        ("transformer-lm", {}, {"kernel": "window", "window": 4, "sinks": 8}),
        ("transformer-lm", {}, {"depth": 5}),
        ("llama", {}, {"depth": 3, "window": 12}),
        ("llama", {"norm_order": "sandwich"}, {"depth": 4}),
        ("llama", {"loops": 2}, {"depth": 4, "loops": 1}),
        ("transformer-lm", {"loops": 2}, {"kernel": "window", "window": 24}),
        ("llama", {"kv_heads": 2}, {"memory_length": 16}),
        ("llama", {"window": 16}, {"window": None}),
        ("llama", {"qk_norm": True}, {"kernel": "window", "window": 12}),
        ("llama", {"kv_heads": 2}, {"kernel": "lolcats", "window": 12}),
    ],
)
def test_a_conversion_that_should_change_nothing_changes_nothing(
    recipe: str, old: dict[str, Any], new: dict[str, Any]
) -> None:
    model = build(recipe, **old)
    converted = mf.convert(model, **new)
    torch.testing.assert_close(logits(converted.model), logits(model), atol=1e-5, rtol=0)
    assert converted.report.difference is not None
    assert converted.report.difference < 1e-5 or "window" in new
    assert converted.model.spec.keywords == model.spec.keywords | new


@pytest.mark.parametrize(
    ("target", "keywords"), [("longformer", {"window": 16}), ("bigbird", {"block": 16, "random": 2})]
)
def test_a_bert_whose_whole_text_is_in_sight_is_equal(target: str, keywords: dict[str, Any]) -> None:
    model = build("bert", max_length=16)
    converted = mf.convert(model, target, max_length=64, **keywords)
    torch.testing.assert_close(logits(converted.model), logits(model), atol=1e-5, rtol=0)
    table = dict(converted.model.named_parameters())["embed.position.weight"]
    assert torch.equal(table, dict(model.named_parameters())["embed.position.weight"].repeat(4, 1))
    (warning,) = converted.report.warnings
    assert "is above half of the 16 positions" in warning
    assert not mf.convert(model, target, max_length=64, **{**keywords, next(iter(keywords)): 8}).report.warnings


def test_global_projections_are_copies() -> None:
    model = build("bert", max_length=16)
    weights = dict(mf.convert(model, "longformer", window=4).model.named_parameters())
    for part in ("q_proj.weight", "kv_proj.bias"):
        expected = dict(model.named_parameters())[f"body.1.attention.inner.{part}"]
        assert torch.equal(weights[f"body.1.attention.inner.global_{part}"], expected)


@pytest.mark.parametrize("sharing", ["mean", "stepwise"])
@pytest.mark.parametrize("recipe", ["transformer-lm", "llama", "compose"])
def test_layers_that_are_applied_twice_are_made_of_those_in_their_places(
    recipe: str, sharing: Any, tmp_path: Path
) -> None:
    model = build(recipe, depth=6)
    new_model, report = mf.convert(model, depth=3, loops=2, sharing=sharing)
    old, new = model.state_dict(), new_model.state_dict()
    chosen = {0: 0, 1: 2, 2: 5}
    derived = [name for name in new if name.startswith("body.") and name[5].isdecimal()]
    assert derived
    for name in derived:
        number, rest = int(name[5]), name[6:]
        mean = (old[f"body.{number % 3}{rest}"] + old[f"body.{number % 3 + 3}{rest}"]) / 2
        expected = mean if sharing == "mean" else old[f"body.{chosen[number % 3]}{rest}"]
        torch.testing.assert_close(new[name], expected)
    assert {origin.kind for origin in report.origins} == {"copied", "derived"}
    assert sum(parameter.numel() for parameter in new_model.parameters()) == report.parameters[1] < report.parameters[0]
    # the same as six layers whose weights are equal by threes
    unrolled = mf.convert(new_model, depth=6, loops=1).model
    torch.testing.assert_close(logits(unrolled), logits(new_model), atol=1e-6, rtol=0)
    new_model.save(tmp_path / "model")
    assert torch.equal(logits(mf.load(tmp_path / "model")), logits(new_model))


@pytest.mark.parametrize("pooling", ["mean", "first"])
def test_heads_of_keys_and_values_are_pooled_in_groups(pooling: str) -> None:
    """Ainslie et al. 2023, section 2.1, by the definition: a group's heads are averaged, keys and values apart."""
    model = build("llama", biases="qkv")
    converted = mf.convert(model, kv_heads=2, pooling=pooling)  # type: ignore[arg-type]
    for kind in ("weight", "bias"):
        name = f"body.1.attention.inner.kv_proj.{kind}"
        old, new = (dict(each.named_parameters())[name] for each in (model, converted.model))
        for part in range(2):
            for group in range(2):
                heads = [old[32 * part + 8 * head : 32 * part + 8 * head + 8] for head in (2 * group, 2 * group + 1)]
                expected = (heads[0] + heads[1]) / 2 if pooling == "mean" else heads[0]
                assert torch.equal(new[16 * part + 8 * group : 16 * part + 8 * group + 8], expected)
    assert {origin.how for origin in converted.report.origins if origin.kind == "derived"} == {
        f"the {pooling} of every 2 heads of keys and values"
    }


def test_equal_heads_may_be_pooled_without_a_change() -> None:
    model = build("llama", kv_heads=2)
    spread = build("llama")
    weights = dict(model.state_dict())
    for name in [name for name in weights if ".kv_proj." in name]:
        weights[name] = weights[name].view(2, 2, 8, 32).repeat_interleave(2, dim=1).reshape(64, 32)
    spread.load_state_dict(weights)
    torch.testing.assert_close(logits(mf.convert(spread, kv_heads=2).model), logits(model), atol=1e-5, rtol=0)


def test_two_overlapping_copies_repeat_the_middle_layers() -> None:
    """Kim et al. 2024, section 3.1: of 4 layers, 6 are layers 0 to 2 and 1 to 3."""
    model = build("llama", depth=4)
    weights = dict(mf.convert(model, depth=6, growth="overlapping").model.named_parameters())
    for number, layer in enumerate([0, 1, 2, 1, 2, 3]):
        expected = dict(model.named_parameters())[f"body.{layer}.ff.inner.up.weight"]
        assert torch.equal(weights[f"body.{number}.ff.inner.up.weight"], expected)


def test_a_new_kernel_has_new_tensors_and_all_other_weights() -> None:
    model = build("transformer-lm")
    converted = mf.convert(model, kernel="favor")
    new = {origin.name for origin in converted.report.origins if origin.kind == "new"}
    assert new == {
        f"body.{layer}.attention.inner.kernel.features.{part}" for layer in range(2) for part in ("matrix", "seed")
    }
    assert kinds(converted) == {"new", "copied"}
    assert any(
        "SoftmaxKernel(Causal(), path=auto) becomes LinearKernel(" in sentence for sentence in converted.report.changes
    )
    back = mf.convert(converted.model, kernel="softmax")
    assert back.report.left_behind.keys() == new
    assert torch.equal(logits(back.model), logits(model))


def test_gated_kernels_add_rows_of_gates() -> None:
    model = build("transformer-lm")
    converted = mf.convert(model, kernel="delta")
    weights = dict(converted.model.named_parameters())["body.0.attention.inner.kv_proj.weight"]
    old = dict(model.named_parameters())["body.0.attention.inner.kv_proj.weight"]
    assert torch.equal(weights[:32], old[:32])
    assert torch.equal(weights[32:].view(4, 9, 32)[:, :8].flatten(0, 1), old[32:])


@pytest.mark.parametrize(
    ("recipe", "old", "to", "keywords"),
    [
        ("transformer-lm", {}, "collaborative", {"shared_dim": 32}),
        ("bert", {"max_length": 16}, "collaborative-encoder", {}),
        ("transformer-lm", {}, "early-exit-lm", {"threshold": 2.0}),
        ("llama", {}, "early-exit-lm", {"rule": "never"}),
        ("transformer", {}, "early-exit-seq2seq", {"threshold": 2.0}),
    ],
)
def test_complete_conversions_at_settings_that_change_nothing(
    recipe: str, old: dict[str, Any], to: str, keywords: dict[str, Any]
) -> None:
    model = build(recipe, **old)
    converted = mf.convert(model, to, **keywords)
    inputs = (TOKENS, TOKENS) if recipe == "transformer" else (TOKENS,)
    torch.testing.assert_close(converted.model(*inputs).logits, model(*inputs).logits, atol=1e-4, rtol=0)
    assert converted.model.spec.recipe == to
    assert converted.report.difference is not None
    assert converted.report.difference < 1e-4


def test_a_memory_is_added() -> None:
    model = build("transformer-xl", memory_length=8)
    converted = mf.convert(model, "memorizing-transformer", knn_memory_size=16, neighbours=2, block=4, layer=1)
    assert {origin.name for origin in converted.report.origins if origin.kind == "new"} == {
        name for name in converted.model.state_dict() if ".combine." in name
    }


@pytest.mark.parametrize(
    ("recipe", "to", "keywords", "message"),
    [
        ("bert", "longfomer", {}, "longformer"),
        ("bert", "bert", {}, "nothing would change: name another recipe than bert"),
        ("bert", "transformer-lm", {}, "no conversion makes a transformer-lm of a bert"),
        ("bert", "longformer", {"windw": 8}, "longformer has no keyword 'windw'"),
        ("bert", None, {"dim": 64}, r"position\.weight has the shape \(512, 32\) in the model and \(512, 64\)"),
        ("llama", None, {"depth": 1, "loops": 3}, r"depth times loops \(3\) must be the number of layers"),
        ("llama", None, {"depth": 1}, r"depth \(1\) is below the 2 layers"),
        ("llama", None, {"kv_heads": 3}, "kv_heads"),
        ("llama", None, {"sinks": 4}, r"sinks \(4\) belong to windows"),
        ("transformer-lm", None, {"sinks": 4}, r"sinks \(4\) belong to windows: set kernel=window"),
        ("llama", None, {"memory_length": 8, "kernel": "linear"}, "is one of tokens, and kernel linear keeps none"),
        ("llama", None, {"qk_norm": True}, r"nothing in the model becomes body\.0\.attention\.inner\.position"),
        ("llama", None, {"tied": True}, r"differ in the model, and are one tensor in the new one"),
        ("transformer-xl", "memorizing-transformer", {}, "set knn_memory_size"),
        ("transformer-lm", "collaborative", {"heads": 2}, "heads cannot change in this conversion"),
    ],
)
def test_keywords_that_the_weights_do_not_fit_are_refused(
    recipe: str, to: str | None, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        mf.convert(build(recipe), to, **keywords)


def test_the_model_is_not_changed() -> None:
    model = build("transformer-lm")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for to, keywords in ((None, {"depth": 4}), ("early-exit-lm", {}), ("collaborative", {})):
        mf.convert(model, to, **keywords)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.spec.recipe == "transformer-lm"


@pytest.mark.parametrize("pair", sorted(CONVERSIONS))
def test_every_conversion_says_its_paper_and_its_finding(pair: tuple[str, str]) -> None:
    conversion = CONVERSIONS[pair]
    assert "arXiv:" in conversion.paper
    assert any(character.isdigit() or character == "third" for character in conversion.finding)
