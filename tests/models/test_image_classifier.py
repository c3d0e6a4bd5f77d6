"""Classifiers of images: patches, pooling, what is refused, and one command that trains and scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import manyformer as mf
from manyformer.models import ClassHead, ImageClassifier, PatchEmbedding
from manyformer.models.image_classifier import split_patches
from manyformer.nn.batches import ImageClassificationBatch
from manyformer.nn.core import Chain, Pointwise
from manyformer.nn.positions import LearnedPosition
from manyformer.recipes.compose import MIXERS
from perturbing import perturb

SMALL = {"classes": 3, "height": 8, "width": 12, "channels": 2, "patch": 4, "dim": 16, "depth": 2}


def images(rows: int = 3) -> Tensor:
    return torch.randint(0, 256, (rows, 8, 12, 2), dtype=torch.uint8)


def test_patches_are_cut_row_by_row() -> None:
    x = torch.arange(2 * 4 * 6 * 3).view(2, 4, 6, 3).float()
    actual = split_patches(x, 2)
    assert actual.shape == (2, 6, 12)
    for number in range(6):
        row, column = number // 3 * 2, number % 3 * 2
        assert torch.equal(actual[1, number], x[1, row : row + 2, column : column + 2].flatten())


def test_brightness_is_taken_as_minus_one_to_one() -> None:
    embed = PatchEmbedding((4, 4, 1), 2, 5)
    dark, bright = (torch.full((1, 4, 4, 1), level, dtype=torch.uint8) for level in (0, 255))
    ones = torch.ones(1, 4, 4, 1)
    for given, expected in ((dark, -ones), (bright, ones)):
        torch.testing.assert_close(
            embed(given, embed.token_positions(given)), embed(expected, embed.token_positions(expected))
        )


def test_leading_tokens_stand_before_all_patches() -> None:
    embed = PatchEmbedding((8, 12, 2), 4, 16, position=LearnedPosition(16, 8), leading=2)
    place = embed.token_positions(images())
    assert embed.tokens == place.position_ids.shape[1] == 8
    assert embed.leading is not None
    with torch.no_grad():
        embed.leading.normal_()
    x = embed(images(), place)
    assert isinstance(embed.position, LearnedPosition)
    torch.testing.assert_close(x[:, :2], (embed.leading + embed.position.weight[:2]).expand(3, -1, -1))


def test_pooling() -> None:
    body, head = Chain(all=Pointwise(torch.nn.Identity())), ClassHead(16, 3)
    first = ImageClassifier(PatchEmbedding((8, 12, 2), 4, 16, leading=1), body, head, pool="first")
    mean = ImageClassifier(PatchEmbedding((8, 12, 2), 4, 16), body, head, pool="mean")
    given = images()
    assert (first(given).logits == 0).all()
    expected = head(mean.embed(given, mean.embed.token_positions(given)).mean(1))
    torch.testing.assert_close(mean(given).logits, expected)
    with pytest.raises(ValueError, match="pool='first' needs a class token"):
        ImageClassifier(PatchEmbedding((8, 12, 2), 4, 16), body, head, pool="first")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"patch": 5}, "an image of 8 x 12 cannot be cut into patches of 5 x 5"),
        ({"positions": "axes", "dim": 15, "heads": 3}, r"dim \(15\) must be even for positions='axes'"),
        ({"positions": "sinusoid"}, "positions: 'sinusoid' is not one of learned, axes, none"),
    ],
)
def test_what_is_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mf.build("vit", **{**SMALL, "heads": 2, **keywords})


def test_images_of_another_size_are_refused() -> None:
    model = mf.build("vit", **SMALL, heads=2)
    with pytest.raises(ValueError, match=r"images \(1, 12, 8, 2\) must be \(b, 8, 12, 2\): the model was built for"):
        model(torch.zeros(1, 12, 8, 2, dtype=torch.uint8))
    with pytest.raises(ValueError, match="7 tokens need as many positions, and the position encoding has 6"):
        PatchEmbedding((8, 12, 2), 4, 16, position=LearnedPosition(16, 6), leading=1)


@pytest.mark.parametrize("positions", ["learned", "axes", "none"])
@pytest.mark.parametrize("pool", ["first", "mean"])
def test_an_encoder_without_positions_sees_a_set_of_patches(positions: str, pool: str) -> None:
    model: Any = mf.build("vit", **SMALL, heads=2, positions=positions, pool=pool, dropout=0.0).eval()
    perturb(model, 0.2)
    given = images()
    turned = torch.cat([given[:, 4:], given[:, :4]], dim=1)
    apart = (model(given).logits - model(turned).logits).abs().max()
    assert (apart < 1e-5) == (positions == "none")


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("pool", ["first", "mean"])
def test_every_mixer_makes_a_classifier(mixer: str, pool: str) -> None:
    model: Any = mf.build("compose-images", **SMALL, heads=2, projected_length=4, mixer=mixer, pool=pool)
    with torch.no_grad():
        model.head.weight.normal_()
    batch = ImageClassificationBatch(images(), torch.tensor([0, 2, 1]))
    loss = model.loss(batch)
    loss.total.backward()
    assert loss.targets == 3
    dead = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    # the last layer's patches take no part where the first token alone is read, and keys' biases shift all scores
    assert not [name for name in dead if "bias" not in name], dead
    # every patch can change the answer
    model.eval()
    for row, column in ((0, 0), (4, 8), (0, 8)):
        other = batch.pixels.clone()
        other[:, row : row + 4, column : column + 4] = 255 - other[:, row : row + 4, column : column + 4]
        assert (model(other).logits - model(batch.pixels).logits).abs().max() > 1e-6


def digits(path: Path) -> None:
    """Two labels that a patch alone does not tell: whether the bright square is in the upper or in the lower half."""
    random = np.random.default_rng(0)
    x, y = random.integers(0, 60, (300, 8, 8), dtype=np.uint8), np.arange(300) % 2
    for image, label, column in zip(x, y, random.integers(0, 4, 300)):
        image[4 * label : 4 * label + 4, 2 * column : 2 * column + 2] = 255
    np.savez(path, train_x=x[:240], train_y=y[:240], test_x=x[240:], test_y=y[240:])


@pytest.mark.parametrize("recipe", ["vit", "mlp-mixer"])
def test_one_command_trains_and_scores(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.inference.evaluate import evaluate
    from manyformer.training import silent, train

    monkeypatch.chdir(tmp_path)
    digits(tmp_path / "a.npz")
    heads = ["heads=2"] if recipe == "vit" else []
    words = ["data.path=a.npz", "patch=2", "dim=16", "depth=1", *heads, "limits.steps=120", "batch.tokens=2048"]
    result = train(recipe, [*words, "optim.lr=0.005", "dropout=0.0"], on_event=silent)
    assert result.scores["accuracy"] > 0.9
    actual = evaluate(result.out)
    assert actual.data == "test"
    assert actual["accuracy"].value > 90
    assert evaluate(result.out, data="a.npz")["accuracy"].value == actual["accuracy"].value
    model = mf.load(result.out)
    assert model.spec.keywords["height"] == 8
    assert model.tokenizer.shape == (8, 8, 1)
    assert json.loads((result.out / "model" / "labels.json").read_text()) == ["0", "1"]


def test_images_as_sequences_train_a_language_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.inference.evaluate import evaluate
    from manyformer.training import silent, train

    monkeypatch.chdir(tmp_path)
    digits(tmp_path / "a.npz")
    words = ["data.kind=images", "data.path=a.npz", "data.levels=4", "dim=16", "depth=1", "heads=2"]
    result = train("transformer-lm", [*words, "limits.steps=3", "batch.tokens=1024"], on_event=silent)
    assert result.load().max_length == 64
    scored = evaluate(result.out, split="valid")
    bits = scored["bits per dimension"].value
    assert bits == pytest.approx(result.scores["loss"] / np.log(2), abs=1e-3)
    assert bits == pytest.approx(result.scores["bits_per_byte"], abs=1e-3)
