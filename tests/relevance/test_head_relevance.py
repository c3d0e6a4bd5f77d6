"""The relevance of heads: conserved from the logit to the embeddings, in every model with rules for its operations."""

from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import manyformer as mf
from manyformer.attention.head_gates import attention_heads
from manyformer.bench import LargestTensorMode
from manyformer.check.tiny_models import build_tiny
from manyformer.errors import UserError
from manyformer.recipes.registry import task_of
from manyformer.relevance import head_relevance, layer_relevance
from manyformer.relevance.kernel_rule import recorded_kernels, recorded_rotations
from manyformer.relevance.relevance_tape import RelevanceTape

TOKENS = torch.tensor([[1, 7, 3, 9, 4, 8]])
MODELS: dict[str, dict[str, Any]] = {
    "transformer-lm": {},
    "transformer-classifier": {},
    "bert": {},
    "transformer": {},
    "transformer ": {"norm_order": "pre"},
    "alibi": {},
    "t5": {},
    "shaw": {},
    "transformer-xl": {},
    "linear-transformer": {},
    "performer": {},
    "roformer": {},
    "llama": {},
}


def tiny(name: str, keywords: dict[str, Any]) -> Any:
    return build_tiny(name.strip(), keywords, 0).double().eval()


@pytest.mark.parametrize("name", MODELS)
def test_relevance_is_conserved(name: str) -> None:
    model = tiny(name, MODELS[name])
    inputs = task_of(model).example(model, TOKENS)
    embedded: list[Tensor] = []
    tape = RelevanceTape()

    def track(module: Any, args: Any, output: Tensor) -> None:
        embedded.append(output)
        tape.track(output)

    for module in model.modules():
        if type(module).__name__ == "TokenEmbedding":
            module.register_forward_hook(track)
    with torch.no_grad(), recorded_kernels(model, tape), recorded_rotations(model, tape), tape:
        logits = task_of(model).call(model, inputs).logits
    relevance = torch.zeros(1, *logits.shape, dtype=torch.float64)
    relevance.view(-1)[int(logits.flatten().argmax())] = 1
    relevances = tape.propagate(logits, relevance)
    total = sum(float(relevances[id(x)].abs().sum()) for x in embedded if id(x) in relevances)
    assert total == pytest.approx(1, abs=1e-9)
    heads = head_relevance(model, inputs)
    assert list(heads) == list(attention_heads(model))
    for name_, part in heads.items():
        assert part.shape == (logits[..., 0].numel(), attention_heads(model)[name_].heads)
        # a branch beside the residual stream has a share of the relevance
        assert bool((part >= 0).all())
        assert bool((part.sum(-1) < 1 + 1e-9).all())
        assert float(part.sum()) > 0
        assert float(layer_relevance(part).max()) <= 1


def test_a_head_without_effect_has_no_relevance() -> None:
    model = tiny("transformer-lm", {})
    layer: Any = next(iter(attention_heads(model).values()))
    with torch.no_grad():
        layer.out_proj.weight[:, : layer.out_proj.in_features // 2] = 0
        layer.out_proj.bias.zero_()
    relevance = head_relevance(model, task_of(model).example(model, TOKENS))
    first = next(iter(relevance.values()))
    assert not first[:, 0].any()
    assert bool((first[:, 1] > 0).all())


def test_a_layer_without_heads_is_a_constant() -> None:
    model = mf.prune_heads(tiny("transformer-lm", {}), {"body.0.attention": [0, 1]})
    relevance = head_relevance(model, task_of(model).example(model, TOKENS))
    assert list(relevance) == ["body.1.attention"]
    assert float(relevance["body.1.attention"].min()) > 0


def test_predictions_are_explained_in_any_number_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("transformer", {})
    inputs = task_of(model).example(model, TOKENS)
    expected = head_relevance(model, inputs)
    monkeypatch.setattr("manyformer.relevance.head_propagation.TARGETS_PER_PASS", 1)
    monkeypatch.setattr("manyformer.relevance.propagation_rules.MAX_IMPACTS", 1)
    for part, relevance in head_relevance(model, inputs).items():
        torch.testing.assert_close(relevance, expected[part])


def test_memory_is_linear_in_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyformer.relevance.attention_rule.MAX_IMPACTS", 1)
    monkeypatch.setattr("manyformer.relevance.propagation_rules.MAX_IMPACTS", 1 << 12)
    sizes = []
    for length in (16, 48):
        model = build_tiny("transformer-lm", {"depth": 1}, 0).eval()
        with LargestTensorMode() as mode:
            head_relevance(model, task_of(model).example(model, torch.full((1, length), 3)))
        sizes.append(mode.elements)
    assert sizes[1] <= 3.1 * sizes[0]


def test_every_recipe_has_relevance_or_a_sentence() -> None:
    explained = []
    for name in mf.recipes():
        model = build_tiny(name, {"depth": 1} if name in MODELS else {}, 0)
        if attention_heads(model):
            with suppress(UserError):
                head_relevance(model, task_of(model).example(model, TOKENS))
                explained.append(name)
    expected = {"transformer", "transformer-lm", "bert", "roformer", "sparse-transformer", "bigbird", "vit", "llama"}
    expected |= {"alibi", "t5", "shaw", "transformer-xl", "linear-transformer", "performer", "rfa", "linformer"}
    assert expected | {"audio-transformer-classifier", "captioner"} <= set(explained)
    assert not {"reformer", "routing-transformer", "universal-transformer-lm"} & set(explained)


def test_what_has_no_rule_is_said() -> None:
    tape = RelevanceTape()
    x = torch.ones(2, 3)
    tape.track(x)
    with tape, pytest.raises(UserError, match="relevance has no rule for the operation softmax"):
        F.softmax(x, -1)
    with pytest.raises(UserError, match="fnet has no attention heads"):
        head_relevance(build_tiny("fnet", {}, 0), task_of(build_tiny("fnet", {}, 0)).example(None, TOKENS))
