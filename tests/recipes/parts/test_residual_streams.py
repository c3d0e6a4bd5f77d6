"""The keyword residual_streams in recipes: initial outputs, contracts, training rules, pruning and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch

import manyformer as mf
from manyformer.base.errors import UserError
from manyformer.config import MuonConfig
from manyformer.conversion.hugging_face.model_export import export_model
from manyformer.nn.attention.attention import MultiHeadLayer
from manyformer.nn.attention.head_gates import remove_heads
from manyformer.nn.core import Context, contiguous_positions
from manyformer.nn.streams import StreamStack
from manyformer.training.layers import checkpoint_activations, compile_layers, default_compilation, layer_depths
from manyformer.training.parameter_rules import parameter_rules

SIZES: dict[str, Any] = {"vocab": 11, "dim": 32, "depth": 2, "heads": 2}
ADDING = ("hyper", "hyper-static", "mhc", "mhc-unmixed")
NAMES = (*ADDING, "attention", "attention-blocks")
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])


def build(recipe: str, residual_streams: str, **keywords: Any) -> Any:
    torch.manual_seed(0)
    return mf.build(recipe, **SIZES, residual_streams=residual_streams, **keywords).double().eval()


def shake(model: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.body.rule.parameters():
            weight += torch.randn(weight.shape, dtype=torch.double, generator=generator) * 0.3
    return model


@pytest.mark.parametrize("recipe", ["compose", "llama", "transformer-lm"])
@pytest.mark.parametrize("name", ADDING)
def test_models_begin_as_the_plain_one(recipe: str, name: str) -> None:
    plain = build(recipe, "plain")
    model = build(recipe, name)
    loaded = model.load_state_dict(plain.state_dict(), strict=False)
    assert not loaded.unexpected_keys
    assert all(key.startswith("body.rule.") for key in loaded.missing_keys)
    # weights of mHC have epsilons that no initial value takes away
    tolerance = 1e-5 if name.startswith("mhc") else 1e-12
    torch.testing.assert_close(model(TOKENS).logits, plain(TOKENS).logits, rtol=0, atol=tolerance)
    assert (shake(model)(TOKENS).logits - plain(TOKENS).logits).abs().max() > 0.01


@pytest.mark.parametrize("name", ["attention", "attention-blocks"])
def test_attention_residuals_begin_as_a_mean_and_not_as_the_plain_model(name: str) -> None:
    model = build("transformer-lm", name)
    ctx = Context(contiguous_positions(1, 0, 9, torch.device("cpu")))
    x = model.embed(TOKENS, ctx.positions)
    outputs = []
    branch_input = x
    for layer in model.body.numbered_layers:
        for branch in layer.branches():
            outputs.append(branch.summand(branch_input, ctx).y)
            sources = outputs
            if name == "attention-blocks":
                # two layers make two blocks of one
                sources = [sum(outputs[start : start + 2]) for start in range(0, len(outputs), 2)]
            branch_input = torch.stack([x, *sources]).mean(0)
    expected = model.head(model.body.norm(branch_input, ctx).y)
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        *(("compose", name) for name in NAMES),
        ("llama", "mhc"),
        ("transformer-lm", "attention"),
        ("reformer-seq2seq", "attention-blocks"),
    ],
)
def test_contracts_are_kept(recipe: str, name: str) -> None:
    only = {"cached", "decode", "beams", "padding-left", "batch", "gradients", "saving", "spec"}
    if recipe != "reformer-seq2seq":
        only |= {"packing", "causal-gradient"}
    report = mf.check(recipe, keywords={"residual_streams": name, "depth": 3}, only=only, length=12)
    assert report.ok, report.table()
    assert {row.contract for row in report.rows if row.verdict == "passed"} == only


@pytest.mark.parametrize("name", NAMES)
def test_outputs_of_layers_are_one_stream_and_the_last_is_that_of_the_stack(name: str) -> None:
    model = shake(build("compose", name))
    ctx = Context(contiguous_positions(1, 0, 9, torch.device("cpu")))
    x = model.embed(TOKENS, ctx.positions)
    outputs = model.body.layer_outputs(x, ctx)
    assert [output.y.shape for output in outputs] == [x.shape] * 3
    torch.testing.assert_close(outputs[-1].y, model.body(x, ctx).y, rtol=0, atol=1e-12)
    # a stack of the lower layer alone, with the rule of both
    parts = dict(model.body.named_children())
    shorter = StreamStack(parts["rule"], **{"0": parts["0"]})
    torch.testing.assert_close(outputs[0].y, shorter(x, ctx).y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_rules_are_trained_by_adamw_without_decay(name: str) -> None:
    model = build("llama", name)
    rules = [rule for rule in parameter_rules(model, MuonConfig(lr=0.01)) if rule.name.startswith("body.rule.")]
    assert len(rules) == len(list(model.body.rule.parameters()))
    assert {(rule.kind, rule.weight_decay) for rule in rules} == {("adamw", 0.0)}


@pytest.mark.parametrize("name", NAMES)
def test_weights_of_rules_have_the_depth_of_their_layer(name: str) -> None:
    model = build("llama", name)
    depths = layer_depths(model, "frozen_layers")
    assert depths.top == 3
    for weight_name, weight in model.body.rule.named_parameters():
        layer = weight_name.removeprefix("layers.").partition(".")[0]
        assert depths.by_weight[weight] == {"0": 1, "1": 2}.get(layer, 3), weight_name


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_layers_have_the_same_gradients(name: str) -> None:
    gradients = []
    for recomputes in (False, True):
        model = shake(build("compose", name)).train()
        if recomputes:
            checkpoint_activations(model)
        model(TOKENS).logits.sin().sum().backward()
        gradients.append([weight.grad for weight in model.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_removed_heads_are_heads_whose_gates_are_closed(name: str) -> None:
    model = shake(build("llama", name))
    gated = shake(build("llama", name))
    attention: Any = gated.get_submodule("body.1.attention.inner")
    assert isinstance(attention, MultiHeadLayer)
    with torch.no_grad():
        width = attention.out_proj.in_features // 2
        attention.out_proj.weight[:, :width] = 0.0
    remove_heads(model, {"body.1.attention": [0]})
    torch.testing.assert_close(model(TOKENS).logits, gated(TOKENS).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_layers_with_weights_of_their_own_are_not_compiled_one_by_one(name: str) -> None:
    model = build("llama", name)
    assert default_compilation(model) == "on"
    assert default_compilation(build("llama", "plain")) == "layers"
    with pytest.raises(UserError, match="set compile=on"):
        compile_layers(model)


def test_layers_of_a_pattern_may_have_different_branches() -> None:
    report = mf.check(
        "compose",
        keywords={"residual_streams": "mhc", "pattern": "F.-K", "depth": 3},
        only={"cached", "decode", "gradients"},
        length=12,
    )
    assert report.ok, report.table()


def test_sizes_are_those_of_the_keywords() -> None:
    assert build("compose", "mhc", stream_count=3).body.rule.streams == 3
    assert build("compose", "hyper").body.rule.streams == 4
    assert build("compose", "attention").body.rule.block_layers is None
    assert build("compose", "attention-blocks", block_layers=2).body.rule.block_layers == 2
    deep = mf.build("compose", vocab=11, dim=8, heads=1, depth=17, residual_streams="attention-blocks")
    assert deep.body.rule.block_layers == 3


@pytest.mark.parametrize(
    ("recipe", "keywords", "reason"),
    [
        ("transformer-lm", {"residual_streams": "hyper", "norm_order": "post"}, "norm_order is post"),
        ("llama", {"residual_streams": "attention", "norm_order": "post"}, "norm_order is post"),
        ("compose", {"residual_streams": "mhc", "loops": 2}, r"loops \(2\) need residual_streams=plain"),
        ("compose", {"residual_streams": "mhc", "gate": "gru"}, "gate 'gru' needs residual_streams=plain"),
        ("llama", {"residual_streams": "mhc", "embedding_skip": True}, "needs residual_streams=plain"),
        ("llama", {"residual_streams": "attention", "value_residual": True}, "needs residual_streams=plain"),
        ("compose", {"residual_streams": "reversible", "stream_count": 2}, r"stream_count \(2\) is for"),
        ("compose", {"stream_count": 2}, r"stream_count \(2\) is for"),
        ("compose", {"residual_streams": "hyper", "stream_count": 1}, "stream_count"),
        ("compose", {"residual_streams": "attention", "block_layers": 2}, r"block_layers \(2\) is for"),
        ("reformer", {"residual_streams": "hyper", "output": "concat"}, "has no two streams"),
    ],
)
def test_what_streams_exclude_is_refused(recipe: str, keywords: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        mf.build(recipe, **SIZES, **keywords)


def test_changes_of_streams_and_early_exits_are_refused() -> None:
    plain = build("transformer-lm", "plain")
    model = build("transformer-lm", "hyper")
    with pytest.raises(UserError, match=r"nothing in the model becomes body\.rule"):
        mf.convert(plain, residual_streams="hyper")
    with pytest.raises(UserError, match=r"no place for body\.rule"):
        mf.convert(model, residual_streams="plain")
    with pytest.raises(UserError, match="use residual_streams=plain"):
        mf.early_exit(model)


@pytest.mark.parametrize("recipe", ["llama", "transformer-lm"])
def test_no_class_of_transformers_is_written_for_them(recipe: str, tmp_path: Path) -> None:
    report = export_model(build(recipe, "hyper"), tmp_path / "exported")
    assert report.reason is not None
    assert report.reason.startswith("residual_streams is hyper")
