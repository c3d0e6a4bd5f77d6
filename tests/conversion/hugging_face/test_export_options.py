"""Exports in other types of numbers, and on the hub."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.cli import run
from manyformer.conversion.hugging_face import export_model, import_model


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return mf.build("transformer-lm", vocab=40, dim=16, depth=1, heads=2, max_length=16).eval()


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_another_type(dtype: str, model: Any, tmp_path: Path) -> None:
    import transformers

    export_model(model, tmp_path, dtype=dtype)
    expected = getattr(torch, dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {expected}
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reference.dtype == expected
    assert torch.equal(reference.transformer.wte.weight, model.embed.token.weight.to(expected))
    back = import_model(tmp_path).model
    for name, weight in model.state_dict().items():
        assert torch.equal(back.state_dict()[name], weight.to(expected).float()), name


def test_numbers_that_do_not_fit(model: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        model.embed.token.weight[0, 0] = 1e6
    with pytest.raises(UserError, match=r"wte\.weight has numbers beyond those of float16; bfloat16 holds them"):
        export_model(model, tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"dtype \(int8\) must be one of float32, bfloat16, float16"):
        export_model(model, tmp_path / "out", dtype="int8")


class FakeHub:
    """A hub that remembers what it was asked for."""

    calls: ClassVar[list[tuple[str, dict[str, Any]]]] = []
    error: ClassVar[Exception | None] = None

    def create_repo(self, **options: Any) -> str:
        if self.error is not None:
            raise self.error
        self.calls.append(("create", options))
        return f"https://hub.invalid/{options['repo_id']}"

    def upload_folder(self, **options: Any) -> None:
        self.calls.append(
            ("upload", {**options, "files": sorted(p.name for p in Path(options["folder_path"]).iterdir())})
        )


def test_an_export_is_pushed(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "calls", [])
    model.save(tmp_path / "model")
    words = ["export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--push", "me/tiny", "--json"]
    assert run(words) == 0
    assert json.loads(capsys.readouterr().out)["address"] == "https://hub.invalid/me/tiny"
    (_, created), (_, uploaded) = FakeHub.calls
    assert created == {"repo_id": "me/tiny", "private": True, "exist_ok": True}
    assert (uploaded["repo_id"], uploaded["folder_path"]) == ("me/tiny", str(tmp_path / "out"))
    assert {"config.json", "model.safetensors", "README.md"} <= set(uploaded["files"])


def test_a_hub_that_cannot_be_reached(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", FakeHub)
    monkeypatch.setattr(FakeHub, "error", ConnectionError("no route\nto host"))
    model.save(tmp_path / "model")
    assert run(["export", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--push", "me/tiny"]) == 2
    message = capsys.readouterr().err
    assert "is written, but it could not be pushed to me/tiny on the hub: no route to host" in " ".join(message.split())
    assert (tmp_path / "out" / "config.json").is_file()


def test_an_encoder_decoder_without_a_tokenizer_is_exported_with_the_ids_that_it_is_drawn_with(tmp_path: Path) -> None:
    pair = mf.build("t5", vocab=40, dim=16, depth=1, heads=2, ff_dim=16)
    export_model(pair, tmp_path)
    settings = json.loads((tmp_path / "generation_config.json").read_text())
    names = ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bad_words_ids")
    assert [settings[name] for name in names] == [1, 2, 0, [[0], [1]]]
