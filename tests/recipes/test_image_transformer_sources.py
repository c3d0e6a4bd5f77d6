"""The Image Transformer with a source: what a class adds, who attends to small images, and what the data gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.config import ImagesData
from manyformer.data import open_data
from manyformer.data.tokenizers.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.inference.generate import complete, enlarge, paint, paint_classes
from manyformer.nn.batches import Seq2SeqBatch

SIZES: dict[str, Any] = {"vocab": 21, "dim": 16, "depth": 2, "heads": 2, "ff_dim": 8, "dropout": 0.0}
IMAGE: dict[str, Any] = {
    **{"height": 4, "width": 6, "channels": 1},
    **{"block_height": 2, "block_width": 3, "memory_height": 2},
}
TOKENS = torch.randint(5, 21, (3, 24), generator=torch.Generator().manual_seed(0))


def of_classes() -> Any:
    torch.manual_seed(0)
    model: Any = mf.build("image-transformer-classes", **SIZES, **IMAGE, classes=3).eval()
    model.tokenizer, model.labels = PixelTokenizer(16, ImageShape(4, 6, 1), (2, 3)), ("a", "b", "c")
    return model


def enlarging() -> Any:
    torch.manual_seed(0)
    model: Any = mf.build("image-transformer-superresolution", **SIZES, **IMAGE, reduction=2, encoder_depth=1).eval()
    model.tokenizer = PixelTokenizer(16, ImageShape(4, 6, 1), (2, 3))
    return model


def test_a_class_is_the_unconditional_model_with_a_vector_at_every_position() -> None:
    """It is added to the embedding of every input with its position (Parmar et al. 2018, section 5.1)."""
    model = of_classes()
    plain: Any = mf.build("image-transformer-2d", **SIZES, **IMAGE).eval()
    weights = model.state_dict()
    names = {"embed_target.": "embed.", "decoder.layers.": "body.", "head.": "head."}
    plain.load_state_dict(
        {
            new + name.removeprefix(old): value
            for name, value in weights.items()
            for old, new in names.items()
            if name.startswith(old)
        }
    )
    vectors = weights["embed_source.embed.token.weight"] * 16**0.5
    classes = torch.tensor([[2], [0], [2]])
    plain.embed.register_forward_hook(lambda module, inputs, output: output + vectors[classes[:, 0]][:, None])
    torch.testing.assert_close(model(classes, TOKENS).logits, plain(TOKENS).logits)


def test_every_value_attends_to_the_whole_small_image() -> None:
    model = enlarging()
    source = torch.randint(5, 21, (1, 6)).expand(7, -1).clone()
    rows = torch.arange(6)
    source[rows, rows] = 5 + (source[rows, rows] - 4) % 16
    with torch.no_grad():
        logits = model(source, TOKENS[:1].expand(7, -1)).logits
    assert ((logits[:6] - logits[6]).abs().amax(-1) > 0).all()
    with pytest.raises(ValueError, match="a source has 6 tokens in this model, and these have 5"):
        model(source[:, :5], TOKENS[:1].expand(7, -1))


def test_cold_images_are_the_likeliest_values_given_their_source() -> None:
    """With a cache, value by value, as in one pass over the finished image."""
    small = (17 * np.random.default_rng(0).integers(0, 16, (2, 2, 3, 1))).astype(np.uint8)
    sources = {"classes": [[2], [2], [0], [0]], "small": (5 + small.reshape(2, 6) // 16).repeat(2, 0).tolist()}
    for kind, source in sources.items():
        model = of_classes() if kind == "classes" else enlarging()
        if kind == "classes":
            images = paint_classes(model, ["c", "a"], tries=2, temperature=1e-4, seed=0).images
        else:
            images = enlarge(model, small, tries=2, temperature=1e-4, seed=0).images
        assert images.shape == (4, 4, 6, 1)
        tokens = torch.tensor([[1, *model.tokenizer.tokens(image)] for image in images])
        with torch.no_grad():
            logits = model(torch.tensor(source), tokens[:, :-1]).logits
        assert torch.equal(5 + logits[..., 5:].argmax(-1), tokens[:, 1:])


def test_results_depend_on_their_source_and_seed_alone() -> None:
    model = of_classes()
    images = paint_classes(model, ["a", "b"], tries=2, seed=3).images
    assert np.array_equal(paint_classes(model, ["b"], tries=2, seed=5).images, images[2:])
    assert (images[0] != images[1]).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: paint_classes(of_classes(), ["d"]), "the model has no class 'd'; "),
        (lambda: paint_classes(enlarging(), ["a"]), "generates no images of a class; image-transformer-classes does"),
        (
            lambda: enlarge(of_classes(), np.zeros((1, 2, 3, 1), np.uint8)),
            "this model enlarges no images; image-",
        ),
        (lambda: enlarge(enlarging(), np.zeros((1, 4, 6, 1), np.uint8)), r"\(1, 4, 6, 1\) must be \(n, 2, 3, 1\)"),
        (lambda: paint(enlarging(), 1), "from a source: give a class, or a small image"),
        (lambda: complete(of_classes(), np.zeros((1, 4, 6, 1), np.uint8)), "from a source"),
        (
            lambda: mf.build("image-transformer-superresolution", **SIZES, **IMAGE, reduction=4),
            r"reduction \(4\) must divide the image of 4 x 6",
        ),
    ],
)
def test_mistakes_get_a_sentence(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images in which every value has the level of the class."""
    generator, labels = np.random.default_rng(0), np.arange(40) % 3
    images = generator.integers(0, 64, (40, 4, 6)) + 64 * labels[:, None, None]
    path = tmp_path_factory.mktemp("images") / "images.npz"
    np.savez(path, x=images.astype(np.uint8), y=labels)
    return path


@pytest.mark.parametrize("form", ["levels-of-classes", "levels-of-small"])
def test_batches_have_the_source_of_each_image(archive: Path, tmp_path: Path, form: str) -> None:
    data = ImagesData(path=str(archive), levels=4, reduction=2 if form == "levels-of-small" else None)
    opened = open_data(data, form, batch_tokens=240, cache=tmp_path, seed=0)
    batch: Any = next(iter(opened.valid))
    assert isinstance(batch, Seq2SeqBatch)
    assert torch.equal(batch.target[:, 1:], batch.targets[:, :-1])
    levels = batch.targets - 5
    if form == "levels-of-classes":
        assert torch.equal(batch.source.expand(-1, 24), levels)
        assert opened.required_keywords == {"vocab": 9, "classes": 3}
    else:
        # levels 0 to 3 are brightness 0, 85, 170, 255
        means = levels.view(-1, 2, 2, 3, 2).double().mul(85).mean((2, 4)).round()
        assert torch.equal(batch.source, 5 + (means * 4 // 256).long().flatten(1))
        assert opened.required_keywords == {"vocab": 9, "reduction": 2}


def test_settings_that_are_for_others_are_refused(archive: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.reduction is the size of the source of super-resolution"):
        open_data(ImagesData(path=str(archive), reduction=2), "levels", batch_tokens=240, cache=tmp_path, seed=0)
    with pytest.raises(UserError, match=r"images of 4 x 6 cannot become 4 times smaller; set data.reduction"):
        open_data(ImagesData(path=str(archive)), "levels-of-small", batch_tokens=240, cache=tmp_path, seed=0)


def test_commands_train_and_draw(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [f"data.path={archive}", "data.kind=images", "data.levels=4", "dim=16", "depth=1", "heads=2"]
    words += ["limits.steps=2", "batch.tokens=96", "--quiet"]
    assert run(["train", "image-transformer-classes", *words, "out=runs/c"]) == 0
    assert run(["train", "image-transformer-superresolution", *words, "data.reduction=2", "out=runs/s"]) == 0
    capsys.readouterr()
    for arguments, picture in (
        (["runs/c", "--class", "1", "--samples", "2"], "runs/c/samples.png"),
        (["runs/s", "--complete", "2", "--tries", "1"], "runs/s/enlarged.png"),
    ):
        assert run(["generate", *arguments, "--seed", "1"]) == 0
        assert capsys.readouterr().out.split() == [picture]
        assert Path(picture).read_bytes().startswith(b"\x89PNG")
    for arguments, message in (
        (["runs/c", "--class", "7"], "has no class '7'"),
        (["runs/c", "--tries", "2"], "leave out --complete, --tries and --data"),
        (["runs/s", "--samples", "2"], "leave out --samples and --class"),
    ):
        assert run(["generate", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    assert run(["view", "runs/s", "--out", "page.html"]) == 0
