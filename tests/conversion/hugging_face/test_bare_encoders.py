"""Encoders of `transformers` without a head: imported as the trunk that a head of any task is put on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_encoders import CASES as ENCODERS
from tiny_encoders import CONFIGS, VOCAB, save_encoder
from tiny_foreign_models import foreign_model
from torch import Tensor

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.conversion.hugging_face import import_model
from manyformer.conversion.hugging_face.model_import import save_imported
from manyformer.training.init_from import load_initial_weights

pytestmark = pytest.mark.oracle

BARE = {f"{name}Model": CONFIGS[name] for name in ("Bert", "Roberta", "DistilBert", "Longformer", "BigBird")}


class WithoutTokenizer:
    """Data whose tokenizer is not compared."""

    def save(self, folder: Path) -> None:
        pass


def hidden_states(model: Any, *inputs: Tensor) -> Tensor:
    """What the head reads."""
    seen: list[Tensor] = []
    handle = model.body.register_forward_hook(lambda module, arguments, output: seen.append(output.y))
    with torch.no_grad():
        model(*inputs)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", BARE)
def test_the_same_hidden_states(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENCODERS, name, BARE[name])
    reference, tokens = save_encoder(name, tmp_path / "theirs"), torch.randint(5, VOCAB, (2, 16))
    model, report = import_model(tmp_path / "theirs")
    with torch.no_grad():
        expected = reference(tokens).last_hidden_state
    torch.testing.assert_close(hidden_states(model, tokens), expected, atol=1e-4, rtol=0)
    assert set(report.new) == {part for part in model.state_dict() if part.startswith("head.transform")} | {"head.bias"}
    save_imported(model, tmp_path / "saved")
    for head, classes in (("classification", 3), ("tagging", 4), ("answer-spans", None), ("masked-lm", None)):
        keywords = {**model.spec.keywords, "head": head, "classes": classes}
        tuned: Any = mf.build(model.spec.recipe, **keywords).eval()
        data: Any = WithoutTokenizer()
        sentence = load_initial_weights(tuned, str(tmp_path / "saved"), data)
        assert "weights initialized from" in sentence
        assert ("is new" in sentence) == (head != "masked-lm")
        torch.testing.assert_close(hidden_states(tuned, tokens), expected, atol=1e-4, rtol=0)


def test_images(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    reference = transformers.ViTModel(transformers.ViTConfig(image_size=16, patch_size=8, **sizes)).eval()
    reference.save_pretrained(tmp_path)
    model, report = import_model(tmp_path)
    images = torch.randn(2, 16, 16, 3)
    with torch.no_grad():
        expected = reference(images.permute(0, 3, 1, 2)).last_hidden_state
    torch.testing.assert_close(hidden_states(model, images), expected, atol=1e-4, rtol=0)
    assert report.new == ("head.weight", "head.bias")
    assert model.labels is None


def test_the_new_head_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setitem(ENCODERS, "BertModel", BARE["BertModel"])
    save_encoder("BertModel", tmp_path / "bert")
    assert run(["import", str(tmp_path / "bert"), "--out", str(tmp_path / "model")]) == 0
    assert "the head is new, with random weights" in capsys.readouterr().err
    for command in ("evaluate", "predict"):
        assert run([command, str(tmp_path / "bert"), "text.txt" if command == "predict" else "--data=text.txt"]) == 2


def test_a_language_model_has_its_head(tmp_path: Path) -> None:
    foreign_model("llama").model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"LlamaModel, which lacks .* lm_head\.weight"):
        import_model(tmp_path)
