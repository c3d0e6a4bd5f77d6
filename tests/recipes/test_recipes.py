"""Recipes: their cards are complete, their specs make them again, and wrong keywords get a sentence."""

import inspect
import json
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
import torch

import manyformer as mf
from manyformer.analysis.contracts import CONTRACTS
from manyformer.base.errors import UserError
from manyformer.models import (
    AudioClassifier,
    BlockDiffusionLM,
    DecisionTransformer,
    EncoderDecoder,
    GraphClassifier,
    ImageClassifier,
    LanguageModel,
    MaskedDiffusionLM,
    MaskedLM,
    NodeClassifier,
    PolicyModel,
    SpeechRecognizer,
    Tagger,
    TextClassifier,
)
from manyformer.models.modalities_model import MultimodalClassifier, TwoTowers
from manyformer.models.tasks.masked_language_modelling import MASKED_LM
from manyformer.recipes import RECIPES, RecipeCard
from manyformer.recipes.parts.cards import FACTS, PROMISES
from manyformer.recipes.transformer_lm import transformer_lm

KINDS = {
    "language-model": LanguageModel,
    "image-generation": LanguageModel,
    "translation": EncoderDecoder,
    "captioning": EncoderDecoder,
    "class-images": EncoderDecoder,
    "super-resolution": EncoderDecoder,
    "multimodal-classification": MultimodalClassifier,
    "contrast": TwoTowers,
    "masked-lm": MaskedLM,
    "masked-diffusion": MaskedDiffusionLM,
    "block-diffusion": BlockDiffusionLM,
    "classification": TextClassifier,
    "tagging": Tagger,
    "image-classification": ImageClassifier,
    "policy": PolicyModel,
    "trajectories": DecisionTransformer,
    "graph-nodes": NodeClassifier,
    "transcription": SpeechRecognizer,
    "attention-transcription": EncoderDecoder,
    "graphs": GraphClassifier,
    "audio-classification": AudioClassifier,
}
CARD: dict[str, Any] = {"title": "A", "paper": "B", "summary": "C", "task": MASKED_LM, "cost": "O(1)"}


def test_the_first_recipes_are_there() -> None:
    names = {"transformer", "transformer-lm", "bert", "transformer-classifier", "compose"}
    assert names <= set(mf.recipes())
    assert list(mf.recipes()) == sorted(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_cards_are_complete(name: str) -> None:
    card = mf.recipes()[name].card
    assert card.name == name
    for text in (card.title, card.paper, card.summary, card.cost):
        assert text.strip() == text != ""
    assert set(card.reasons) <= {*PROMISES, *FACTS, *CONTRACTS}
    assert all(reason.strip() == reason != "" for reason in card.reasons.values())
    assert ("cross_attention" in card.promises) == card.task.takes_source


def test_a_card_promises_all_but_what_it_gives_a_reason_against() -> None:
    assert RecipeCard(name="x", **CARD).promises == list(PROMISES)
    card = RecipeCard(name="x", **CARD, reasons={"incremental_decoding": "it cannot", "float16": "it rounds"})
    assert card.promises == ["causal", "cross_attention", "padding_invariant"]


ONE_LAYER = {"bahdanau"}
"""Recipes whose paper has one layer of each kind."""

NEEDED_KEYWORDS = {
    "image-classification": {"classes", "height", "width", "channels", "patch"},
    "policy": {"observations", "actions", "continuous"},
    "trajectories": {"observations", "actions", "continuous", "window"},
    "graph-nodes": {"features", "classes"},
    "transcription": {"vocab", "mels"},
    "attention-transcription": {"vocab", "mels"},
    "graphs": {"features", "classes"},
    "audio-classification": {"mels", "classes"},
}
"""The keywords that a task needs, by its name; others need a vocabulary."""

AROUND = {"early-exit-lm", "early-exit-seq2seq"}
"""Recipes around others, whose keywords are a record of their own."""


def parts_of(annotation: Any) -> set[Any]:
    """The types of a union, without bounds and meanings."""
    if get_origin(annotation) is Annotated:
        return parts_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return {inner for part in get_args(annotation) for inner in parts_of(part)}
    return {annotation}


@pytest.mark.parametrize("name", RECIPES)
def test_signatures_are_command_lines(name: str) -> None:
    """Every keyword has a default and a type that a flag can have, and common ones have one spelling."""
    signature = mf.recipes()[name].signature
    for word, parameter in signature.parameters.items():
        assert parameter.default is not inspect.Parameter.empty, word
        assert parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY), word
        assert get_origin(parameter.annotation) is Annotated, word
        plain = {int, float, str, bool, type(None), tuple[float, ...]}
        plain |= {dict[str, Any]} if name in AROUND or word == "body_keywords" else set()
        for part in parts_of(parameter.annotation):
            assert get_origin(part) is Literal or part in plain, word
    needed = NEEDED_KEYWORDS.get(mf.recipes()[name].card.task.name, {"vocab"})
    layers = set() if name in ONE_LAYER else {"depth"}
    sizes = {"base_keywords"} if name in AROUND else layers | {"dim"}
    assert needed | sizes <= set(signature.parameters)
    assert not {"n_heads", "num_heads", "d_model", "n_layers", "layers", "vocab_size"} & set(signature.parameters)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", RECIPES)
def test_the_spec_makes_the_model_again(name: str) -> None:
    recipe = mf.recipes()[name]
    with torch.device("meta"):
        model = mf.build(name)
        assert isinstance(model, KINDS[recipe.card.task.name])
        assert model.spec.recipe == name
        assert set(model.spec.keywords) == set(recipe.signature.parameters)
        spec = json.loads(json.dumps(model.spec._asdict()))
        again = mf.build(spec["recipe"], **spec["keywords"])
    assert again.spec == model.spec
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}


def test_a_recipe_is_a_function() -> None:
    model = transformer_lm(29, dim=16, depth=1, heads=2)
    assert model.spec.recipe == "transformer-lm"
    assert model.spec.keywords["vocab"] == 29
    assert model.spec.keywords["norm_order"] == "pre"
    assert "GPT-2" in str(transformer_lm.__doc__)


@pytest.mark.parametrize(
    ("name", "keywords", "message"),
    [
        ("transfromer", {}, r"there is no recipe 'transfromer'; did you mean transformer"),
        ("xyzzy", {}, r"there is no recipe 'xyzzy'; known: .*bert.*transformer"),
        ("transformer-lm", {"deph": 3}, r"transformer-lm has no keyword 'deph'; did you mean depth\?"),
        ("transformer-lm", {"norm_order": "mid"}, r"norm_order: 'mid' is not one of post, pre, sandwich"),
        ("compose", {"position": "rotory"}, r"position: 'rotory' is not one of sinusoid"),
        ("transformer-lm", {"dim": 0}, r"dim: must be a whole number >= 1, got 0"),
        ("transformer-lm", {"depth": -1}, r"depth: must be a whole number >= 1, got -1"),
        ("transformer-lm", {"dropout": 1.0}, r"dropout: must be a number >= 0 and < 1, got 1.0"),
        ("transformer-lm", {"dropout": float("nan")}, r"dropout: must be a number >= 0 and < 1, got nan"),
        ("transformer-lm", {"dim": 30, "heads": 4}, r"dim \(30\) must be a multiple of heads \(4\)"),
        ("compose", {"heads": 4, "kv_heads": 3}, r"heads \(4\) must be a multiple of kv_heads \(3\)"),
        ("transformer", {"dim": 9, "heads": 3}, r"dim \(9\) must be even"),
        ("compose", {"gate": "gru", "residual_streams": "reversible"}, r"gate 'gru' needs residual_streams=plain"),
        ("gtrxl", {"observations": "8x8"}, r"observations \('8x8'\) must be the size of a vector, such as 8, or"),
        ("gtrxl", {"gate": "lstm"}, r"gate: 'lstm' is not one of residual, input, output, highway, sigtanh, gru"),
    ],
)
def test_mistakes_get_a_sentence(name: str, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mf.build(name, **keywords)


def test_unknown_names_are_for_the_user_to_mend() -> None:
    with pytest.raises(UserError):
        mf.build("transfromer")


CHOICES = {
    word: get_args(part)
    for word, parameter in RECIPES["compose"].signature.parameters.items()
    for part in parts_of(parameter.annotation)
    if get_origin(part) is Literal
}


@pytest.mark.parametrize(("word", "value"), [(word, value) for word, values in CHOICES.items() for value in values])
def test_compose_takes_every_part_it_names(word: str, value: str) -> None:
    small = {"vocab": 11, "dim": 16, "depth": 1, "heads": 2}
    model: Any = mf.build("compose", **small, **{word: value})
    # longer than the windows and blocks of sparse patterns
    tokens = torch.randint(0, 11, (2, 200))
    logits = model(tokens).logits
    assert logits.shape == (2, 200, 11)
    default: Any = mf.build("compose", **small)
    # shared logits change the loss alone
    changed = value != RECIPES["compose"].signature.parameters[word].default and (word, value) != ("ahead", "shared")
    same = {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in default.named_parameters()}
    if same:
        # random features have tensors besides parameters
        default.load_state_dict(model.state_dict(), strict=False)
        assert torch.equal(default(tokens).logits, logits) != changed


def test_the_sparse_transformer_with_the_positions_of_the_paper_has_its_size() -> None:
    with torch.device("meta"):
        model = mf.build("sparse-transformer", position="grid")
    # table 1: 95 M for enwik8
    assert sum(weight.numel() for weight in model.parameters()) == pytest.approx(95e6, rel=0.005)
    small: dict[str, Any] = {"vocab": 9, "dim": 8, "depth": 1, "heads": 2, "max_length": 12, "stride": 4, "summary": 1}
    position = mf.build("sparse-transformer", **small, position="grid").embed.position
    rows, columns = (axis.weight for axis in position.axes)
    torch.testing.assert_close(position.rows(torch.tensor([0, 5, 11])), rows[[0, 1, 2]] + columns[[0, 1, 3]])
