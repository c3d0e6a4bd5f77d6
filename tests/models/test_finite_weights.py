"""Weights that are not finite are told by everything that reads weights, and nothing else is."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import manyformer as mf
from manyformer.base.errors import NonFiniteWeights
from manyformer.cli import run
from manyformer.models.model_files import warn_non_finite

SIZES = {"vocab": 19, "dim": 16, "depth": 2, "heads": 2, "max_length": 32}
WEIGHT = "body.0.ff.inner.up.weight"


def saved(folder: Path, spoil: Callable[[torch.Tensor], None]) -> Path:
    model = mf.build("transformer-lm", **SIZES)
    with torch.no_grad():
        spoil(dict(model.named_parameters())[WEIGHT])
    model.save(folder)
    return folder


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_loading_tells_of_them(number: float, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", lambda weight: weight[1].fill_(number))
    with pytest.warns(NonFiniteWeights) as warned:
        mf.load(folder)
    sentence = f"a tensor of the weights is not finite ({WEIGHT}); what the model computes is no number"
    assert [str(warning.message) for warning in warned] == [f"{folder}/model.safetensors: {sentence}"]


def test_all_of_them_are_counted(tmp_path: Path) -> None:
    model = mf.build("transformer-lm", **SIZES)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(math.nan)
    count, first = len(list(model.parameters())), next(iter(dict(model.named_parameters())))
    with pytest.warns(NonFiniteWeights, match=rf"x: {count} of \d+ tensors .* \(the first is {first}\)"):
        warn_non_finite(model, "x")


def test_largest_numbers_and_infinite_masks_are_no_fault() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((4, 4), torch.finfo(torch.float32).max))
            self.register_buffer("mask", torch.full((4, 4), -math.inf))
            self.register_buffer("numbers", torch.arange(3))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_non_finite(Masked(), "x")
    spoiled = Masked()
    spoiled.mask[0, 0] = math.nan
    with pytest.warns(NonFiniteWeights, match=r"\(mask\)"):
        warn_non_finite(spoiled, "x")


def _hugging_face(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=19, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.mlp.c_fc.weight"][0] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_imported_model_is_told_too(tmp_path: Path) -> None:
    folder = _hugging_face(tmp_path / "gpt2")
    with pytest.warns(NonFiniteWeights, match=f"{folder}: a tensor of the weights is not finite"):
        mf.load(folder)


@pytest.mark.parametrize("verb", ["export", "convert"])
def test_every_verb_tells_of_them(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(saved(tmp_path / "model", lambda weight: weight.fill_(math.nan)))
    out = str(tmp_path / "out")
    arguments = {
        "export": [folder, "--out", out],
        "convert": [folder, "window=8", "--out", out],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        run([verb, *arguments[verb]])
    assert f"warning: {folder}/model.safetensors: a tensor of the weights is not finite" in capsys.readouterr().err
