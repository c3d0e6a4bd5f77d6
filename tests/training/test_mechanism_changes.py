"""A start from a model with another kernel: what is new, what changes, and what stays."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeSource

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.nn.core import contiguous_positions
from manyformer.training.init_from import load_initial_weights
from perturbing import perturb

SIZES: dict[str, Any] = {"vocab": 11, "dim": 16, "depth": 2, "heads": 2}


def saved(tmp_path: Path, recipe: str, **keywords: Any) -> Any:
    model = perturb(mf.build(recipe, **SIZES, **keywords), 0.3)
    model.save(tmp_path / "model")
    return model


def started(tmp_path: Path, recipe: str, **keywords: Any) -> tuple[Any, list[str]]:
    model = mf.build(recipe, **SIZES, **keywords)
    return model, load_initial_weights(model, str(tmp_path), NoText("language-model")).split("; ")[1:]


class NoText(FakeSource):
    """Data without a tokenizer."""

    def save(self, folder: Path) -> None:
        return None


NEW, GATES = "new, tensors of a kernel of another kind", "derived, rows of gates are new"
ORIGINS = {"favor": [NEW], "favor-relu": [NEW], "rfa": [NEW], "rfa-gate": [NEW, GATES], "delta": [GATES]}


@pytest.mark.parametrize("kernel", ["linear", "favor", "favor-relu", "rfa", "rfa-gate", "delta", "taylor", "window"])
def test_a_softmax_model_starts_every_kernel(tmp_path: Path, kernel: str) -> None:
    softmax = saved(tmp_path, "compose", kernel="softmax")
    model, changes = started(tmp_path, "compose", kernel=kernel)
    own = dict(model.named_parameters())
    for name, weight in softmax.named_parameters():
        if own[name].shape == weight.shape:
            assert torch.equal(own[name], weight)
    assert "SoftmaxKernel(Causal(), path=auto) becomes" in changes[0]
    origins = [origin for change in changes if (origin := change.split(":")[0]) in (NEW, GATES)]
    assert origins == ORIGINS.get(kernel, [])
    model(torch.randint(0, 11, (1, 6)))


def test_gates_are_new_rows_between_the_old_ones(tmp_path: Path) -> None:
    softmax = saved(tmp_path, "compose", kernel="softmax")
    model, changes = started(tmp_path, "compose", kernel="rfa-gate")
    layer, old = (m.body.get_submodule("0.attention.inner") for m in (model, softmax))
    x, positions = torch.randn(1, 3, 16), contiguous_positions(1, 0, 3, torch.device("cpu"))
    (k, v), (old_k, old_v) = layer.project_kv(x, positions), old.project_kv(x, positions)
    assert torch.equal(k, old_k)
    torch.testing.assert_close(v[..., :-1], old_v)
    assert "body.0.attention.inner.kv_proj (rows of gates)" in changes[-1] or "others like it" in changes[-1]


def test_many_features_start_where_softmax_stopped(tmp_path: Path) -> None:
    """Choromanski et al. 2021: the features estimate the softmax of the trained model without bias."""
    softmax = mf.build("compose", **SIZES, kernel="softmax")
    softmax.save(tmp_path / "model")
    tokens, losses = torch.randint(0, 11, (2, 24)), []
    for features in (8, 2048):
        model: Any = mf.build("performer", **SIZES, features=features)
        load_initial_weights(model, str(tmp_path), NoText("language-model"))
        with torch.inference_mode():
            losses.append(float((model.eval()(tokens).logits - softmax.eval()(tokens).logits).square().mean()))
    assert losses[1] < 0.1 * losses[0]


def test_what_has_equal_names_but_computes_another_thing_is_told(tmp_path: Path) -> None:
    saved(tmp_path, "alibi")
    _, changes = started(tmp_path, "linear-transformer")
    text = "; ".join(changes)
    assert "AlibiPosition(2 heads) becomes NoPosition()" in text
    assert re.search(r"embed.position: NoPosition\(.*\) becomes SinusoidalPosition\(", text)
    assert re.search(r"SoftmaxKernel\(Causal\(\).*\) becomes LinearKernel\(.*EluPlusOneFeatures", text)


def test_heads_activations_and_scales_are_told(tmp_path: Path) -> None:
    saved(tmp_path, "compose")
    model: Any = mf.build("compose", **{**SIZES, "heads": 4}, feedforward="relu")
    text = load_initial_weights(model, str(tmp_path), NoText("language-model"))
    assert "Attention(2 heads) becomes Attention(4 heads)" in text
    assert "GELU" in text


def test_an_equal_model_has_nothing_to_tell(tmp_path: Path) -> None:
    saved(tmp_path, "performer", features=8)
    _, changes = started(tmp_path, "performer", features=8, dropout=0.1)
    assert changes == []


def test_positions_with_weights_that_have_no_place_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "transformer-lm")
    with pytest.raises(UserError, match=r"it holds embed.position.weight, which the model does not have"):
        started(tmp_path, "linear-transformer")


def test_a_linformer_encoder_starts_from_one_with_softmax(tmp_path: Path) -> None:
    saved(tmp_path, "transformer", max_length=24)
    model: Any = mf.build("transformer", **SIZES, max_length=24, encoder_kernel="linformer")
    name = "encoder.0.attention.inner.kernel.keys.weight"
    initial = model.get_parameter(name).clone()
    changes = load_initial_weights(model, str(tmp_path), NoText("translation")).split("; ")[1:]
    assert torch.equal(model.get_parameter(name), initial)
    assert "becomes LinformerKernel(" in changes[0]
    assert name in changes[1]
