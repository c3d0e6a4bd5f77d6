"""`mf.explain` says of each layer its file and its path in training, for a prompt and for a step; nothing changes."""

from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.models.layer_paths import Explanation, LayerPath
from manyformer.recipes.parts.registry import task_of

SIZES: dict[str, Any] = {"vocab": 13, "dim": 16, "depth": 2, "heads": 2}
TOKENS = torch.arange(24)[None] % 13


def explained(recipe: str, *inputs: torch.Tensor, **keywords: Any) -> Explanation:
    parameters = mf.recipes()[recipe].signature.parameters
    model = mf.build(recipe, **{name: value for name, value in SIZES.items() if name in parameters}, **keywords)
    explanation = mf.explain(model, *inputs)
    assert isinstance(explanation, Explanation)
    return explanation


def layer(explanation: Explanation, name: str) -> LayerPath:
    return next(layer for layer in explanation.layers if layer.name == name)


def test_each_phase_of_a_language_model_has_its_path() -> None:
    causal = "sdpa: causal from the first token on, by torch's flag"
    explanation = explained("transformer-lm", TOKENS)
    assert explanation == {f"body.{number}.attention.inner.kernel": causal for number in range(2)}
    own = "its own one-token step"
    expected = ("SoftmaxKernel", "nn/softmax/softmax_kernel.py", causal, causal, own)
    assert layer(explanation, "body.0.attention.inner")[1:] == expected
    assert layer(explanation, "body.1.ff.inner")[1:] == (
        "FeedForward",
        "nn/feed_forward/feedforward.py",
        "forward",
        "forward",
        own,
    )
    assert str(explanation).splitlines()[:4] == [
        "body.0.attention.inner, body.1.attention.inner: SoftmaxKernel, nn/softmax/softmax_kernel.py",
        f"  training  {causal}",
        f"  prefill   {causal}",
        f"  step      {own}",
    ]


def test_a_step_by_forward_has_the_path_of_its_kernel() -> None:
    explanation = explained("reformer-strict", TOKENS)
    step = next(layer.step for layer in explanation.layers if layer.kind == "LSHKernel")
    assert step not in ("", "its own one-token step")
    assert list(mf.explain(mf.build("reformer-strict", **SIZES)))


def test_an_encoder_reads_the_prompt_and_makes_no_step() -> None:
    explanation = explained("transformer", TOKENS, TOKENS[:, :9])
    encoder, cross = layer(explanation, "encoder.0.attention.inner"), layer(explanation, "decoder.0.cross.inner")
    assert (encoder.training, encoder.prefill, encoder.step) == ("sdpa: every key is visible",) * 2 + ("",)
    assert cross.step == "its own one-token step"


def test_a_model_that_generates_nothing_has_training_alone() -> None:
    explanation = explained("bert", TOKENS)
    assert {(layer.prefill, layer.step) for layer in explanation.layers} == {("", "")}
    assert "prefill" not in str(explanation)


def test_a_model_that_cannot_continue_says_why() -> None:
    explanation = explained("routing-transformer", TOKENS)
    assert "not causal, so it cannot continue from a state" in str(explanation).splitlines()[-1]


def test_a_layer_that_does_not_call_its_kernel_is_named_itself() -> None:
    explanation = mf.explain(build_tiny("deepseek", {}, 0), TOKENS)
    assert isinstance(explanation, Explanation)
    row = layer(explanation, "body.0.attention.inner")
    assert (row.kind, row.file, row.training) == ("LatentAttention", "nn/attention/latent_attention.py", "forward")


@pytest.mark.parametrize(("recipe", "training"), [("conformer", True), ("routing-transformer", True), ("bert", False)])
def test_a_model_stays_as_it_was(recipe: str, training: bool) -> None:
    model = build_tiny(recipe, {}, 0).train(training)
    task = task_of(model)
    ids = torch.randint(task.token_ids(model), (1, 48))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    mf.explain(model, *task.arguments(model, task.example(model, ids)))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(module.training == training for module in model.modules())
