"""Images from a model: every value is drawn given those before it, and what was given stays as it was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.data.tokenizers.pixel_tokenizer import ImageShape, PixelTokenizer
from manyformer.inference.generate import complete, paint
from manyformer.inference.generate.image_generation import half_image_rows
from manyformer.nn.structures import pixel_order

BLOCKS = {"1d": None, "2d": (2, 3)}


def painter(kind: str, **keywords: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab": 21, "dim": 16, "depth": 2, "heads": 2, "height": 4, "width": 6, "channels": 1}
    near: dict[str, Any] = (
        {"block": 6, "memory_block": 6} if kind == "1d" else {"block_height": 2, "block_width": 3, "memory_height": 2}
    )
    model = mf.build("image-transformer" + ("-2d" if kind == "2d" else ""), **sizes, **near, **keywords)
    model.tokenizer = PixelTokenizer(16, ImageShape(4, 6, 1), BLOCKS[kind])
    return model


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("mixtures", [None, 2])
def test_cold_images_are_the_likeliest_values_in_turn(kind: str, mixtures: int | None) -> None:
    """With a cache that forgets, value by value, as in one pass over the finished image."""
    model = painter(kind, logistic_mixtures=mixtures)
    actual = paint(model, 2, temperature=1e-4, seed=0)
    assert actual.images.shape == (2, 4, 6, 1)
    assert actual.stats.new_tokens == 48
    tokens = torch.tensor([[1, *model.tokenizer.tokens(image)] for image in actual.images])
    with torch.no_grad():
        logits = model.eval()(tokens[:, :-1]).logits
    assert torch.equal(5 + logits[..., 5:].argmax(-1), tokens[:, 1:])


def test_seeds() -> None:
    model, shares = painter("1d"), list[float]()
    images = paint(model, 4, seed=7, on_progress=shares.append).images
    assert np.array_equal(paint(model, 2, seed=9).images, images[2:])
    assert (images[0] != images[1]).any()
    assert shares[-1] == 1
    assert shares == sorted(shares)
    assert (paint(model, 1).images != paint(model, 1).images).any()


@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_given_stays(kind: str) -> None:
    model = painter(kind)
    # sixteen levels in brightness
    given = (17 * np.random.default_rng(0).integers(0, 16, (3, 4, 6, 1))).astype(np.uint8)
    actual = complete(model, given, tries=2, seed=1)
    assert actual.images.shape == (6, 4, 6, 1)
    assert np.array_equal(actual.images[:, :2], given[:, :2].repeat(2, 0))
    assert (actual.images[0, 2:] != actual.images[1, 2:]).any()
    # every one has a seed of its own, and depends on nothing else
    alone = complete(model, given[1:2], rows=2, tries=2, seed=1 + 2)
    assert np.array_equal(alone.images, actual.images[2:4])
    same = complete(model, given[[0, 0]], seed=1).images
    assert (same[0] != same[1]).any()


def test_halves() -> None:
    def levels(height: int, *block: int) -> PixelTokenizer:
        return PixelTokenizer(4, ImageShape(height, 6, 1), block or None)  # type: ignore[arg-type]

    assert [
        half_image_rows(levels(7)),
        half_image_rows(levels(8, 2, 3)),
        half_image_rows(levels(6, 2, 3)),
        half_image_rows(levels(4, 4, 6)),
    ] == [3, 4, 2, 2]
    with pytest.raises(UserError, match="this model generates blocks 4 rows high, so no half of an image comes first"):
        half_image_rows(levels(4, 4, 3))


def test_images_that_cannot_be_generated_are_refused() -> None:
    model = painter("2d")
    images = np.zeros((1, 4, 6, 1), np.uint8)
    for rows in (0, 1, 3, 4):
        with pytest.raises(UserError, match=rf"rows \({rows}\) must be whole rows of blocks, and fewer than the 4"):
            complete(model, images, rows=rows)
    with pytest.raises(UserError, match=r"images \(1, 6, 4, 1\) must be \(n, 4, 6, 1\)"):
        complete(model, images.swapaxes(1, 2))
    with pytest.raises(UserError, match="ask for at least one"):
        paint(model, 0)
    model.tokenizer = None
    with pytest.raises(UserError, match="this model generates no images"):
        paint(model, 1)


def test_one_command_paints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """From images through training and bits per dimension to two pictures."""
    from PIL import Image

    from manyformer.inference.evaluate import evaluate, held_images

    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (60, 4, 6), dtype=np.uint8)
    np.savez("a.npz", train_x=images[:50], train_y=np.arange(50) % 3, test_x=images[50:], test_y=np.arange(10) % 3)
    np.savez("b.npz", x=images[:4])
    words = [
        "data.kind=images",
        "data.path=a.npz",
        "data.block=[2, 3]",
        "data.levels=4",
        "memory_height=2",
        "logistic_mixtures=2",
    ]
    sizes = ["dim=16", "depth=1", "heads=2", "limits.steps=3", "batch.tokens=96", "out=runs/a"]
    assert run(["train", "image-transformer-2d", *words, *sizes]) == 0
    assert "manyformer generate runs/a" in capsys.readouterr().out
    assert mf.load("runs/a").spec.keywords["block_height"] == 2
    assert evaluate("runs/a")["bits per dimension"].signature == "per:value|values:240"
    held = {image.tobytes() for image in np.uint8(85) * (images[50:] // 64)}
    assert all(image.tobytes() in held for image in held_images("runs/a", 5))
    capsys.readouterr()
    assert run(["generate", "runs/a", "--samples", "5", "--complete", "3", "--tries", "2", "--seed", "1"]) == 0
    said = capsys.readouterr().out.split()
    assert said == ["runs/a/samples.png", "runs/a/completed.png"]
    zoom, across = 14, 6 * 14 + 6
    for name, columns, rows, head in ((said[0], 3, 2, 0), (said[1], 4, 3, 30)):
        sheet = Image.open(name).convert("RGB")
        assert sheet.size == (columns * across + 6, rows * (4 * zoom + 6) + 6 + head)
    assert run(["generate", "runs/a", "--complete", "2", "--samples", "0", "--data", "b.npz", "--out", "there"]) == 0
    assert [file.name for file in Path("there").iterdir()] == ["completed.png"]
    assert run(["generate", "runs/a", "--top-k", "3"]) == 2
    assert "generates images, and --top-k is for text: leave it out" in capsys.readouterr().err
    assert run(["generate", "runs/a", "--complete", "0", "--samples", "0"]) == 2
    assert "nothing to generate" in capsys.readouterr().err


def test_the_order_of_pixels_is_that_of_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from manyformer.training import silent, train

    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", x=np.random.default_rng(0).integers(0, 256, (60, 4, 6), dtype=np.uint8))
    words = ["data.kind=images", "data.path=a.npz", "block_height=2", "dim=16", "heads=2", "limits.steps=1"]
    with pytest.raises(UserError, match=r"model\.block_height is 2, but the data makes it 1"):
        train("image-transformer-2d", [*words, "batch.tokens=96"], on_event=silent)
    assert pixel_order((4, 6, 1), (1, 6)).tolist() == list(range(24))
