"""Names of published sizes: they build what was published, and are saved as the recipe that they stand for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli.model_arguments import read_keywords
from manyformer.config.published_sizes import (
    ALIASES,
    NEAREST_RECIPES,
    PUBLISHED_SIZES,
    nearest_recipe,
    published_size,
)
from manyformer.nn.core import state_bytes
from manyformer.recipes.parts.registry import build_on_meta, get_recipe

# numbers of parameters with tied weights counted once: the released checkpoints' own
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "roberta-base": 124_697_433,
    "roberta-large": 355_412_057,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "vit-b/16": 86_567_656,
    "vit-l/16": 304_326_632,
    "llama-2-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
}


def parameters_of(model: nn.Module) -> int:
    return sum(weight.numel() for weight in {id(weight): weight for weight in model.parameters()}.values())


@pytest.mark.parametrize("name", sorted(PUBLISHED_SIZES))
def test_a_published_size_has_as_many_parameters_as_the_released_model(name: str) -> None:
    model = build_on_meta(name, {})
    # RoBERTa's table of positions begins with two rows that no token ever gets
    unused = 2 * model.spec.keywords["dim"] if name.startswith("roberta") else 0
    assert parameters_of(model) == PARAMETERS[name] - unused


def test_a_published_size_takes_keywords_and_is_saved_as_its_recipe(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"dim": 16, "depth": 1, "heads": 2, "ff_dim": 24, "vocab": 11, "max_length": 8}
    model = mf.build("gpt2", **sizes)
    assert model.spec.recipe == "transformer-lm"
    assert model.spec.keywords["gelu_approximate"] == "tanh"
    model.save(tmp_path / "model")
    tokens = torch.arange(8)[None]
    assert torch.equal(mf.load(tmp_path / "model").eval()(tokens).logits, model.eval()(tokens).logits)


def test_a_misspelled_published_size_is_suggested() -> None:
    with pytest.raises(UserError, match="did you mean gpt2-large or gpt2-xl"):
        get_recipe("gpt2-lagre")


def test_another_name_is_the_same_size() -> None:
    assert published_size("vit-b-16") is PUBLISHED_SIZES["vit-b/16"]
    assert get_recipe("bert-base-uncased").signature == get_recipe("bert-base").signature
    assert set(ALIASES.values()) <= set(PUBLISHED_SIZES)
    assert not set(ALIASES) & (set(PUBLISHED_SIZES) | set(mf.recipes()))


@pytest.mark.parametrize("name", ["bloom-560m", "EleutherAI/pythia-70m", "gpt-neox-20b", "distilbert-base"])
def test_a_published_model_without_a_recipe_is_answered_by_the_nearest(name: str) -> None:
    with pytest.raises(UserError, match="the nearest recipe is "):
        get_recipe(name)
    assert {recipe for recipe, _ in NEAREST_RECIPES.values()} <= set(mf.recipes())
    assert not set(NEAREST_RECIPES) & set(mf.recipes())


@pytest.mark.parametrize("family", sorted(NEAREST_RECIPES))
def test_the_keywords_of_a_nearest_recipe_are_taken_by_it(family: str) -> None:
    recipe, difference = NEAREST_RECIPES[family]
    words = [word.strip(",;") for word in difference.split() if "=" in word]
    # the same keyword twice is a choice
    for word in words:
        name, value = next(iter(read_keywords(get_recipe(recipe), [word]).items()))
        assert get_recipe(recipe).signature.parameters[name].default != value, word


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("Phi-3-mini-4k-instruct", "llama"),
        ("phi3", "llama"),
        ("microsoft/phi-2", "compose"),
        ("Qwen3-8B", "llama: take qk_norm=true"),
        ("Qwen2.5-7B", "llama: take biases=qkv"),
        ("gptj-6b", "compose"),
        ("opus-mt", None),
    ],
)
def test_a_version_of_a_family_is_answered_by_its_own_nearest_recipe(name: str, recipe: str | None) -> None:
    sentence = nearest_recipe(name)
    assert sentence is None if recipe is None else (sentence or "").startswith(f"the nearest recipe is {recipe}")


def test_no_recipe_has_the_name_of_a_published_size() -> None:
    assert not set(PUBLISHED_SIZES) & set(mf.recipes())


def test_every_published_size_is_what_the_released_configuration_gives(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from manyformer.conversion.hugging_face.hf_folder import HFConfig
    from manyformer.conversion.hugging_face.model_import import family_of

    labels = {index: str(index) for index in range(1000)}
    released = {
        "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config()),
        "bert-base": ("BertForMaskedLM", transformers.BertConfig()),
        "t5-small": ("T5ForConditionalGeneration", transformers.T5Config()),
        "vit-b/16": ("ViTForImageClassification", transformers.ViTConfig(id2label=labels)),
        "mistral-7b": ("MistralForCausalLM", transformers.MistralConfig()),
    }
    for name, (model_class, config) in released.items():
        config.architectures = [model_class]
        config.save_pretrained(tmp_path / name)
        with torch.device("meta"):
            tensors = getattr(transformers, model_class)(config).state_dict()
        read = HFConfig.read(tmp_path / name)
        family = family_of(read)
        keywords = family.read_keywords(read._replace(tensors=family.complete_names(tensors.keys())))
        ours = {key: parameter.default for key, parameter in get_recipe(name).signature.parameters.items()}
        differing = {key: (value, ours[key]) for key, value in keywords.items() if ours[key] != value}
        assert family.recipe == PUBLISHED_SIZES[name].recipe
        assert differing == {}, name


CONSTANT_AFTER = 700
"""Tokens by three quarters of which what decoding keeps has stopped growing in tiny models, whose memories have 512."""


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", sorted(name for name, recipe in mf.recipes().items() if recipe.card.state))
def test_the_state_of_a_recipe_grows_only_where_its_card_says_so(name: str) -> None:
    from manyformer.analysis.own_models import OwnSubject, build_tiny
    from manyformer.models.tasks import Inputs

    subject = OwnSubject(build_tiny(name, {}, 0))
    subject.module.eval()
    limit = min(subject.max_length or CONSTANT_AFTER, CONSTANT_AFTER)
    multiple = subject.length_multiple
    limit = limit // multiple * multiple

    def bytes_after(length: int) -> int:
        generator = torch.Generator().manual_seed(0)
        draws = torch.randint(len(subject.token_ids), (1, length), generator=generator)
        source = subject.token_ids[draws[:, :8]] if subject.takes_source else None
        inputs = Inputs(subject.token_ids[draws], None, source)
        state = subject.init_state(inputs)
        with torch.no_grad():
            for column in range(length):
                state = subject(inputs.columns(column, column + 1), state).state
        return state_bytes(state)

    grows = bytes_after(limit) > bytes_after(limit * 3 // 4)
    assert grows == (mf.recipes()[name].card.state == "grows")
