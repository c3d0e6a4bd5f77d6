"""Vision Transformers of `transformers` and their imports compute the same, and so do exports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import exported, save_tiny

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.conversion.hugging_face import export_model, import_model
from manyformer.conversion.hugging_face.model_import import save_imported

pytestmark = pytest.mark.oracle

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": [8, 12],
    "patch_size": 4,
    "num_channels": 3,
    "id2label": {0: "cat", 1: "dog", 2: "cow"},
}
ARCHITECTURES = {
    "ViTForImageClassification": "none",
    "DeiTForImageClassification": "unread",
    "DeiTForImageClassificationWithTeacher": "read",
}
"""The architectures with the distillation token that they have."""


def assert_same(theirs: Any, model: Any) -> None:
    images = torch.randn(2, 8, 12, 3)
    with torch.no_grad():
        expected = theirs(images.permute(0, 3, 1, 2)).logits
        torch.testing.assert_close(model(images).logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_same_logits_after_import_and_export(name: str, tmp_path: Path) -> None:
    reference = save_tiny(tmp_path / "theirs", name, SIZES)
    model, report = import_model(tmp_path / "theirs")
    assert report.keywords["distillation_token"] == ARCHITECTURES[name]
    assert model.labels == ("cat", "dog", "cow")
    assert_same(reference, model)
    assert type(exported(model, tmp_path / "ours", assert_same)) is type(reference)
    save_imported(model, tmp_path / "saved")
    assert mf.load(tmp_path / "saved").labels == model.labels


@pytest.mark.parametrize(("mean", "scaling"), [([0.5, 0.5, 0.5], "symmetric"), ([0.485, 0.456, 0.406], "imagenet")])
def test_bytes_become_the_same_numbers(mean: list[float], scaling: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")

    reference = save_tiny(tmp_path, "ViTForImageClassification", SIZES)
    deviation = [0.229, 0.224, 0.225] if scaling == "imagenet" else [0.5] * 3
    settings = {"image_mean": mean, "image_std": deviation, "size": {"height": 8, "width": 12}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    model, report = import_model(tmp_path)
    assert report.keywords["pixel_scaling"] == scaling
    image = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8)
    export_model(model, tmp_path / "ours")
    processor = transformers.ViTImageProcessorPil.from_pretrained(tmp_path / "ours")
    pixels = torch.as_tensor(np.array(processor(image)["pixel_values"]))
    with torch.no_grad():
        logits = model(torch.from_numpy(image)[None]).logits
        torch.testing.assert_close(logits, reference(pixels.float()).logits, atol=1e-4, rtol=0)


def test_keywords_that_disagree() -> None:
    with pytest.raises(UserError, match="stands beside a class token: set pool to first"):
        mf.build("vit", pool="mean", distillation_token="read")
    with pytest.raises(ValueError, match="is for 3 channels, and images have 1"):
        mf.build("vit", height=8, width=8, patch=4, channels=1, pixel_scaling="imagenet")


def test_turned_photos_have_the_labels_of_the_pipeline(tmp_path: Path) -> None:
    """All eight EXIF orientations, and gray, palette and transparent files beside them."""
    import transformers
    from PIL import Image

    from manyformer.inference.evaluate import predict

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=3)
    theirs = transformers.ViTForImageClassification(config).eval()
    for weights in theirs.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, 0, 0.3)
    theirs.save_pretrained(tmp_path / "vit")
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    processor.save_pretrained(tmp_path / "vit")
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    photos = tmp_path / "photos"
    photos.mkdir()
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        Image.fromarray(pixels[..., :3]).save(photos / f"turned-{orientation}.png", exif=exif)
    Image.fromarray(pixels).save(photos / "clear.png")
    Image.fromarray(pixels[..., 0]).save(photos / "gray.png")
    Image.fromarray(pixels[..., :3]).quantize(40).save(photos / "palette.png", transparency=3)
    pipeline = transformers.pipeline("image-classification", model=theirs, image_processor=processor, top_k=3)
    lines: list[str] = []
    predictions = list(predict(tmp_path / "vit", str(photos), top=3, log=lines.append))
    assert len(predictions) == 11
    for item in predictions:
        expected = pipeline(item.input.name)
        actual = item.prediction[0]
        assert [label.label for label in actual] == [label["label"] for label in expected], item.input.name
        probabilities = [label.probability for label in actual]
        np.testing.assert_allclose(probabilities, [label["score"] for label in expected], atol=1e-5)
    assert f"7 images turned as the EXIF orientation says (first: {photos}/turned-2.png)" in lines
    assert f"2 images read without transparency, with colors as the file has them (first: {photos}/clear.png)" in lines
    assert f"1 image converted from gray to three equal channels (first: {photos}/gray.png)" in lines
