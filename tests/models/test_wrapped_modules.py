"""Modules that other tools have wrapped, hooked, pruned, parametrized or quantized act wherever the model computes."""

import copy
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.base.errors import UserError
from manyformer.config import LoraConfig
from manyformer.conversion.hugging_face.model_export import export_model
from manyformer.conversion.surgery.lora import attach_lora
from manyformer.models import Model
from manyformer.models.policy_model import PolicyModel
from manyformer.models.tasks import Inputs
from manyformer.recipes.parts.registry import task_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from other_tools.cells import ToolCell
from other_tools.subject import decoded_of, decodes
from other_tools.wrappers import by_lora, linears

QUICK = {"bahdanau", "calm", "deepseek", "longformer-lm", "mixtral", "mamba-2", "t5", "transformer-xl", "vit"}
"""One recipe for each way in which weights were read past their modules, and some others."""

LENGTH = 12


class AddedProduct(nn.Module):
    """What an adapter adds to a linear layer; of that layer it offers nothing but its call."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        outputs, inputs = base.weight.shape
        self.base = base
        self.down, self.up = (
            nn.Parameter(torch.randn(*shape, generator=generator, dtype=base.weight.dtype) * 0.3)
            for shape in ((inputs, 2), (2, outputs))
        )
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.base(x) + x @ self.down @ self.up
        return y


class Tiny(NamedTuple):
    """A recipe's test size with inputs and targets."""

    model: Model
    inputs: Inputs
    targets: Tensor

    @classmethod
    def of(cls, name: str, dtype: torch.dtype = torch.float64) -> "Tiny":
        model = build_tiny(name, {}, 0).to(dtype).eval()
        task = task_of(model)
        generator = torch.Generator().manual_seed(0)
        length = task.fixed_length(model) or min(LENGTH, model.max_length or LENGTH)
        inputs = task.example(model, torch.randint(5, task.token_ids(model), (3, length), generator=generator))
        return cls(model, inputs, task.random_targets(model, inputs, generator))

    def logits(self, model: Model) -> Tensor:
        with torch.no_grad():
            return task_of(model).call(model, self.inputs).logits

    def loss(self, model: Model) -> Tensor:
        torch.manual_seed(0)
        loss = model.loss(task_of(model).batch(model, self.inputs, self.targets))
        return (loss.total + loss.extra).detach()

    def trained_loss(self, model: Model) -> Tensor:
        try:
            return self.loss(model.train())
        finally:
            model.eval()


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def wrap_all(model: nn.Module) -> dict[str, AddedProduct]:
    """Put something in the place of every linear layer, also where one stands in two places; by the first name."""
    generator = torch.Generator().manual_seed(1)
    wrappers = {name: AddedProduct(linear, generator) for name, linear in linears(model).items()}
    by_base = {id(wrapper.base): wrapper for wrapper in wrappers.values()}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in by_base and not name.endswith(".base"):
            replace(model, name, by_base[id(module)])
    return wrappers


@pytest.mark.parametrize("part", range(4))
def test_what_is_put_in_place_of_linear_layers_acts_everywhere(part: int) -> None:
    """Forward, losses, single tokens, selected rows and early exits are those of a model with merged matrices."""
    for name in sorted(mf.recipes())[part::4]:
        tiny = Tiny.of(name)
        wrapped, merged = tiny.model, copy.deepcopy(tiny.model)
        wrappers = wrap_all(wrapped)
        with torch.no_grad():
            for path, wrapper in wrappers.items():
                merged.get_submodule(path).weight.add_((wrapper.down @ wrapper.up).T)  # type: ignore[operator, union-attr]
        computed = [tiny.logits, tiny.loss, tiny.trained_loss]
        if decodes(wrapped):
            computed += [
                partial(decoded_of, inputs=tiny.inputs),
                partial(decoded_of, inputs=tiny.inputs, rows=[2, 0, 2]),
            ]
        for compute in computed:
            actual, expected = compute(wrapped), compute(merged)
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
        assert [path for path, wrapper in wrappers.items() if not wrapper.calls] == [], name


def test_the_gate_of_retrieved_tokens_is_called_where_there_are_any() -> None:
    tiny = Tiny.of("spalm")
    wrappers = wrap_all(tiny.model)
    tokens = tiny.inputs.tokens
    tiny.model(tokens, neighbours=tokens[..., None])
    assert wrappers["body.recall.gate"].calls == 1


@pytest.mark.parametrize("name", ["gtrxl", "lstm-policy"])
def test_a_policy_acts_by_its_wrapped_layers(name: str) -> None:
    model = build_tiny(name, {}, 0).double().eval()
    assert isinstance(model, PolicyModel)
    observations, segments = torch.randn(2, 5, *model.embed.space.shape).double(), torch.zeros(2, 5, dtype=torch.long)
    actions, rewards = torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5).double()
    plain = model(observations, segments, model.init_state(2), actions, rewards)
    wrap_all(model)
    with torch.no_grad():
        output = model(observations, segments, model.init_state(2), actions, rewards)
        actor = model.begin_acting(model.init_state(2))
        steps = [actor.act(*(part[:, i] for part in (observations, segments, actions, rewards))) for i in range(5)]
    assert not torch.allclose(output.logits, plain.logits)
    torch.testing.assert_close(torch.stack([step.logits for step in steps], 1), output.logits)
    torch.testing.assert_close(torch.stack([step.values for step in steps], 1), output.values)


QUICK_OR_SLOW = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in sorted(mf.recipes())
    # of lstm-lm neither the cells nor the head are linear layers
    if name != "lstm-lm"
]


@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", QUICK_OR_SLOW)
def test_forward_decoding_and_the_merged_model_agree(name: str) -> None:
    for column in ("LoRA", "weight_norm", "pruning", "quantization"):
        assert ToolCell(name, column).result()["result"] == "right", column


@pytest.mark.parametrize("name", ["mixtral", "transformer-lm", "transformer-xl"])
def test_torchao_quantizes_weights(name: str) -> None:
    pytest.importorskip("torchao", reason="pip install torchao")
    assert ToolCell(name, "torchao").result() == {"result": "right"}


def test_decoding_that_is_bound_notices_hooks_and_adapters() -> None:
    tiny = Tiny.of("transformer-lm")
    model = tiny.model
    token = tiny.inputs.tokens[:, :1]
    seen: list[str] = []
    with torch.inference_mode():
        step, state = model.next_token(), model.init_state(3)  # type: ignore[operator]
        before = step(token, state, None)[0]
        handle = next(iter(linears(model).values())).register_forward_hook(lambda *_: seen.append("called"))
        step(token, state, None)
        handle.remove()
        step(token, state, None)
        assert seen == ["called"]
        step = model.next_token()  # type: ignore[operator]
        wrap_all(model)
        after = step(token, state, None)[0]
        assert not torch.equal(after, before)
        torch.testing.assert_close(after, model(token).logits)


@pytest.mark.parametrize(
    "hook",
    [
        lambda module, inputs, output: output.y * 0,
        lambda module, inputs, output: (output[0] * 0, *output[1:]),
        lambda module, inputs, output: output._replace(y=output.y * 0),
    ],
)
def test_what_a_hook_returns_takes_the_place_of_the_stream(hook: Any) -> None:
    tiny = Tiny.of("transformer-lm")
    layer = tiny.model.get_submodule("body.0.attention.inner")
    ablated = copy.deepcopy(tiny.model)
    out_proj = ablated.get_submodule("body.0.attention.inner.out_proj")
    for weight in out_proj.parameters():
        nn.init.zeros_(weight)
    layer.register_forward_hook(hook)
    for compute in (tiny.logits, tiny.loss, partial(decoded_of, inputs=tiny.inputs)):
        torch.testing.assert_close(compute(tiny.model), compute(ablated))


def test_other_results_of_hooks_are_refused_where_they_are_returned() -> None:
    tiny = Tiny.of("transformer-lm")
    layer = tiny.model.get_submodule("body.0.attention.inner")
    for hook, what in ((lambda *call: call[-1] * 0, "0 values"), (lambda *call: 3, "an object of int")):
        handle = layer.register_forward_hook(hook)
        with pytest.raises(TypeError, match=rf"hook of Attention returned {what}: .*output._replace\(y=...\)"):
            tiny.logits(tiny.model)
        handle.remove()


def test_hooks_of_a_model_and_its_head_may_return_logits() -> None:
    tiny = Tiny.of("transformer-lm")
    plain, loss = tiny.logits(tiny.model), tiny.loss(tiny.model)
    handle = tiny.model.register_forward_hook(lambda module, inputs, output: output.logits * 2)
    torch.testing.assert_close(tiny.logits(tiny.model), plain * 2)
    handle.remove()
    tiny.model.head.register_forward_hook(lambda module, inputs, output: output * 0)
    assert not tiny.logits(tiny.model).any()
    assert tiny.loss(tiny.model) > loss * 0.1
    per_target = tiny.loss(tiny.model) / (tiny.targets >= 0).sum()
    torch.testing.assert_close(per_target, torch.tensor(29.0, dtype=torch.float64).log())


Q_PROJ = "body.0.attention.inner.q_proj"


def with_peft(model: Model) -> Model:
    peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))  # type: ignore[arg-type]
    return model


def with_own_adapter(model: Model) -> Model:
    attach_lora(model, LoraConfig(rank=2, parts=("q_proj",)))
    return model


def with_mask(model: Model) -> Model:
    prune.l1_unstructured(model.get_submodule(Q_PROJ), "weight", 0.5)
    return model


def with_parametrization(model: Model) -> Model:
    weight_norm(model.get_submodule(Q_PROJ))
    return model


def with_old_weight_norm(model: Model) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.get_submodule(Q_PROJ))
    return model


def with_quantized_weights(model: Model) -> Model:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized: Model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    return quantized


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (with_peft, "merge_and_unload"),
        (with_own_adapter, "merge_lora"),
        (with_mask, "prune.remove"),
        (with_parametrization, "remove_parametrizations"),
        (with_old_weight_norm, "remove_weight_norm"),
        (with_quantized_weights, "before it is quantized"),
    ],
)
def test_models_that_load_could_not_give_back_are_not_written(change: Any, remedy: str, tmp_path: Path) -> None:
    model = change(build_tiny("transformer-lm", {}, 0))
    with pytest.raises(UserError, match=f"{Q_PROJ} has .* cannot be saved as it is: .*{remedy}"):
        model.save(tmp_path / "saved")
    with pytest.raises(UserError, match=f"{Q_PROJ} has .* cannot be exported as it is: .*{remedy}"):
        export_model(model, tmp_path / "exported")
    assert not list(tmp_path.iterdir())


def test_a_merged_adapter_is_saved_and_loaded(tmp_path: Path) -> None:
    tiny = Tiny.of("transformer-lm", torch.float32)
    merged: Any = by_lora(tiny.model)()
    merged.save(tmp_path / "model")
    torch.testing.assert_close(tiny.logits(mf.load(tmp_path / "model")), tiny.logits(merged), rtol=0, atol=0)


def test_heads_are_not_removed_from_a_layer_with_a_mask() -> None:
    model = with_mask(build_tiny("transformer-lm", {}, 0))
    with pytest.raises(UserError, match="heads cannot be removed from a Linear that has hooks"):
        model.get_submodule("body.0.attention.inner").keep_heads([0])  # type: ignore[operator]


def test_a_model_with_adapters_of_peft_is_checked() -> None:
    model: Any = build_tiny("transformer-lm", {}, 0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    report = mf.check(adapted, only=["decode", "saving"], length=12)
    assert report.ok
    assert "merge_and_unload" in {row.contract: row for row in report.rows}["saving"].sentence
