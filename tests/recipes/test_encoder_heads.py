"""One trunk with the head of each task: every recipe of masked language modelling, one from outside included."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.models import EncoderModel, MaskedLM, ModelSpec, SpanReader, Tagger, TextClassifier, TokenEmbedding
from manyformer.models.embedding import positions_of
from manyformer.models.encoder_model import first_token
from manyformer.models.tasks import Inputs
from manyformer.models.tasks.masked_language_modelling import ENCODER_HEADS, MASKED_LM
from manyformer.nn import SoftmaxKernel
from manyformer.nn.core import PADDING_SEGMENT, Context
from manyformer.recipes import RECIPES, all_recipes, recipe
from manyformer.recipes.parts.baselines import attention_layers, masked_lm
from manyformer.recipes.parts.registry import recipe_of_spec, task_of

ENCODERS = [name for name, entry in all_recipes().items() if entry.card.task is MASKED_LM]
SHAPES = {
    "classification": (TextClassifier, (2, 3)),
    "sentence-pairs": (TextClassifier, (2, 3)),
    "tagging": (Tagger, (2, 12, 3)),
    "answer-spans": (SpanReader, (2, 12, 2)),
    "masked-lm": (MaskedLM, (2, 12, 29)),
}
TOKENS = torch.randint(5, 29, (2, 12), generator=torch.Generator().manual_seed(0))


def with_head(name: str, head: str) -> EncoderModel:
    model = build_tiny(name, {"head": head} | ({"classes": 3} if ENCODER_HEADS[head].has_labels else {}), 0).eval()
    assert isinstance(model, EncoderModel)
    return model


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_the_head_of_any_task(name: str) -> None:
    assert SHAPES.keys() == ENCODER_HEADS.keys()
    for head, (model_class, shape) in SHAPES.items():
        model = with_head(name, head)
        assert type(model) is model_class
        assert task_of(model).name == head
        assert task_of(model).call(model, Inputs(TOKENS)).logits.shape == shape


def test_heads_are_those_of_bert() -> None:
    """Devlin et al. 2019: tanh of a dense layer of the first token, projected; and a projection of every token."""
    classifier, tagger = with_head("bert", "classification"), with_head("bert", "tagging")

    def hidden(model: EncoderModel) -> torch.Tensor:
        positions, _ = positions_of(TOKENS, None, None)
        stream: torch.Tensor = model.body(model.embed(TOKENS, positions), Context(positions)).y
        return stream

    weights = dict(classifier.named_parameters())
    dense = hidden(classifier)[:, 0] @ weights["head.transform.0.weight"].T + weights["head.transform.0.bias"]
    expected = dense.tanh() @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(classifier(TOKENS).logits, expected)
    weights = dict(tagger.named_parameters())
    torch.testing.assert_close(tagger(TOKENS).logits, hidden(tagger) @ weights["head.weight"].T + weights["head.bias"])


def test_sentence_types_are_added_to_the_embedding() -> None:
    """Devlin et al. 2019, figure 2: the vector of the sentence joins those of the token and of its position."""
    keywords = {"vocab": 29, "dim": 8, "depth": 1, "heads": 2, "dropout": 0.0, "head": "sentence-pairs", "classes": 2}
    model, plain = mf.build("bert", sentence_types=2, **keywords), mf.build("bert", **keywords)
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if "types" not in name})
    parts = torch.tensor([[0] * 5 + [1] * 7, [0] * 3 + [1] * 4 + [2] * 5])
    assert model.uses_parts
    with pytest.raises(ValueError, match="does not use the parts"):
        plain(TOKENS, parts=parts)
    positions = positions_of(TOKENS, None, None)[0]._replace(part_ids=parts)
    types = dict(model.named_parameters())["embed.types.weight"]
    plain.embed.norm, model.embed.norm = None, None
    expected = plain.embed(TOKENS, positions) + types[parts.clamp(max=1)]
    torch.testing.assert_close(model.embed(TOKENS, positions), expected)
    first = model(TOKENS, parts=torch.zeros_like(parts)).logits
    torch.testing.assert_close(model(TOKENS).logits, first)


def test_the_first_token_is_the_first_without_padding() -> None:
    segments = torch.tensor([[PADDING_SEGMENT, 0, 0], [0, 0, PADDING_SEGMENT], [PADDING_SEGMENT] * 3])
    stream = torch.arange(9.0).view(3, 3, 1).masked_fill((segments == PADDING_SEGMENT)[..., None], torch.nan)
    positions = positions_of(segments, segments, None)[0]
    assert first_token(stream, positions).flatten().tolist() == [1.0, 3.0, 0.0]


def test_the_head_leaves_the_trunk_as_it_is() -> None:
    torch.manual_seed(0)
    masked = mf.build("bert", vocab=9, dim=8, depth=1, heads=2)
    torch.manual_seed(0)
    tagger = mf.build("bert", vocab=9, dim=8, depth=1, heads=2, head="tagging", classes=2)
    trunk = {name: value for name, value in masked.state_dict().items() if name.startswith(("embed.", "body."))}
    assert all(torch.equal(tagger.state_dict()[name], value) for name, value in trunk.items())
    assert tagger.state_dict().keys() - trunk.keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("head", [["masked-lm"], {"head": "masked-lm"}, 3])
def test_a_saved_head_that_is_no_name_is_damage(head: object, tmp_path: Path) -> None:
    with pytest.raises(DamagedFile, match="is damaged: head"):
        recipe_of_spec(ModelSpec("bert", {"head": head}), tmp_path)


def test_the_number_of_labels_must_fit_the_head() -> None:
    with pytest.raises(UserError, match="head=tagging needs classes, the number of labels"):
        mf.build("bert", head="tagging")
    with pytest.raises(UserError, match=r"head=masked-lm has no labels, so classes \(3\) must be left out"):
        mf.build("fnet", classes=3)
    with pytest.raises(UserError, match=r"head: 'tagger' is not one of .*tagging"):
        mf.build("etc", head="tagger", classes=3)


@pytest.fixture
def foreign_encoder() -> Iterator[str]:
    @recipe("Foreign encoder", paper="none", summary="None.", task=MASKED_LM, cost="O(1)")
    def foreign_encoder(vocab: int = 9, dim: int = 8, depth: int = 1, heads: int = 2) -> MaskedLM:
        layers = attention_layers(dim, heads, None, lambda number: SoftmaxKernel())
        return masked_lm(TokenEmbedding(vocab, dim), depth, layers, dropout=0.0)

    yield "foreign-encoder"
    del RECIPES["foreign-encoder"]


def test_a_recipe_of_another_package_has_the_heads_without_a_line(foreign_encoder: str) -> None:
    model = mf.build(foreign_encoder, head="classification", classes=4)
    assert task_of(model).name == "classification"
    assert model(torch.tensor([[1, 5, 2]])).logits.shape == (1, 4)


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("head", sorted(ENCODER_HEADS.keys() - {"masked-lm"}))
@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_keeps_its_contracts_with_each_head(name: str, head: str) -> None:
    assert mf.check(with_head(name, head)).ok
