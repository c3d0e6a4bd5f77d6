"""What a fine-tuning trains: frozen parts and layers stay as they are, rates fall with depth, adapters are merged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeSource, FakeSpan, a_run
from runs import go, learned, stopped

import manyformer as mf
from manyformer.base.errors import UserError, UserErrors
from manyformer.config import AdagradConfig, AdamWConfig, LabelsData, RunConfig, load_run
from manyformer.training.build_model import freeze_layers
from manyformer.training.engine import set_learning_rate
from manyformer.training.optimizers import LR_SCALE, make_optimizer
from manyformer.training.run_folder import recipe_lookup
from manyformer.training.session import DataOpener

SIZES = {"dim": 16, "depth": 3, "heads": 2, "max_length": 8}


def opened(task: str) -> DataOpener:
    data = FakeSource(task)
    data.length_limits = [FakeSpan(8)]
    return lambda run, out, say: data


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model after three steps."""
    out = tmp_path_factory.mktemp("pretrained")
    go(a_run(out, "bert", model=SIZES | {"dropout": 0.1}, limits={"steps": 3}), opened=opened("masked-lm"))
    return out


def classifier(pretrained: Path, out: Path, **settings: Any) -> RunConfig:
    labels = LabelsData(path="made-up", max_length=8)
    model = SIZES | {"dropout": 0.1}
    defaults = {"model": model, "data": labels, "init_from": str(pretrained), "limits": {"steps": 4}}
    return a_run(out, "bert", **defaults | settings)


@pytest.mark.parametrize(
    ("settings", "prefixes"),
    [
        ({"frozen_layers": 2}, ("embed.", "body.0.", "body.1.")),
        ({"frozen_layers": "all"}, ("embed.", "body.")),
        ({"frozen": ["body.1", "embed"]}, ("embed.", "body.1.")),
    ],
)
def test_frozen_weights_are_equal_bit_for_bit_and_have_no_optimizer_state(
    pretrained: Path, tmp_path: Path, settings: dict[str, Any], prefixes: tuple[str, ...]
) -> None:
    go(classifier(pretrained, tmp_path, **settings), opened=opened("classification"))
    before, after = mf.load(pretrained).state_dict(), mf.load(tmp_path).state_dict()
    for name, value in after.items():
        if name in before and before[name].shape == value.shape and not name.startswith("head."):
            assert torch.equal(value, before[name]) == name.startswith(prefixes), name
    checkpoint = tmp_path / "checkpoints" / "step-00000004"
    states = {key.rpartition("/")[0] for key in _tensors(checkpoint / "optimizer.safetensors")}
    assert states == {name for name, _ in mf.load(tmp_path).named_parameters() if not name.startswith(prefixes)}


def _tensors(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as handle:
        return list(handle.keys())


def test_frozen_layers_have_no_dropout() -> None:
    model: Any = mf.build("bert", vocab=11, **SIZES, dropout=0.5, head="classification", classes=3)
    freeze_layers(model, 2)
    model.train()
    assert [model.embed.training, *(layer.training for layer in model.body.children())] == [False, False, False, True]
    tokens, outputs = torch.arange(8)[None], []
    model.get_submodule("body.2").register_forward_pre_hook(lambda _, inputs: outputs.append(inputs[0]))
    model(tokens), model(tokens)
    assert torch.equal(outputs[0], outputs[1])
    # the layer above draws its own
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


def test_what_cannot_be_frozen_is_refused(pretrained: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="frozen_layers is 4, but the model has 3 layers"):
        go(classifier(pretrained, tmp_path / "1", frozen_layers=4), opened=opened("classification"))
    with pytest.raises(UserError, match="nothing remains to be trained"):
        go(classifier(pretrained, tmp_path / "2", frozen=["embed", "body", "head"]), opened=opened("classification"))
    with pytest.raises(UserError, match=r"frozen_layers needs one stack of layers.*encoder, "):
        freeze_layers(mf.build("transformer", vocab=11, dim=16, depth=2, heads=2), 1)
    with pytest.raises(UserErrors, match="frozen_layers 1: needs init_from"):
        load_run("bert", ["frozen_layers=1"], recipes=recipe_lookup())
    with pytest.raises(UserErrors, match="a number of layers, all or null"):
        load_run("bert", ["frozen_layers=some", "init_from=x"], recipes=recipe_lookup())


LAYERS = {"bert": "body.", "etc": "body.inner.", "reformer": "body.layers.", "transformer-lm": "body.", "vit": "body."}


@pytest.mark.parametrize("recipe", sorted(LAYERS))
@pytest.mark.parametrize("config", [AdamWConfig(lr=1.0, layer_decay=0.5), AdagradConfig(lr=1.0, layer_decay=0.5)])
def test_rates_fall_by_layer(recipe: str, config: AdamWConfig | AdagradConfig) -> None:
    """Against the rule written down: the head 1, the top layer 1/2, each below half of that, the embedding lowest."""
    sizes = {"height": 8, "width": 8, "channels": 1, "classes": 3} if recipe == "vit" else {"vocab": 11}
    patch = {"patch": 4} if recipe == "vit" else {}
    model: Any = mf.build(recipe, dim=16, depth=3, heads=2, **sizes, **patch)
    optimizer = make_optimizer(model, config)
    set_learning_rate(optimizer, 0.1)
    rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    for name, weight in model.named_parameters():
        rule = {f"{LAYERS[recipe]}{number}.": 0.5 ** (3 - number) for number in range(3)} | {"embed.": 0.5**4}
        expected = next((rate for prefix, rate in rule.items() if name.startswith(prefix)), 1.0)
        assert rates[id(weight)] == pytest.approx(0.1 * expected), name


def test_one_rate_has_the_groups_of_before() -> None:
    model = mf.build("bert", vocab=11, **SIZES)
    plain, equal = (make_optimizer(model, AdamWConfig(lr=1.0, layer_decay=decay)) for decay in (None, 1.0))
    groups = [[(group[LR_SCALE], len(group["params"])) for group in each.param_groups] for each in (plain, equal)]
    assert groups[0] == groups[1]


@pytest.mark.parametrize("recipe", ["transformer", "universal-transformer-lm"])
def test_layers_without_a_depth_are_refused(recipe: str) -> None:
    model = mf.build(recipe, vocab=11, dim=16, heads=2, **({"depth": 2} if recipe == "transformer" else {}))
    with pytest.raises(UserError, match=r"optim.layer_decay needs one stack of layers"):
        make_optimizer(model, AdamWConfig(lr=1.0, layer_decay=0.9))


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"optim": {"lr": 1e-2, "layer_decay": 0.8}},
        {"lora": {"rank": 2, "alpha": 4, "input_dropout": 0.1, "parts": ["q_proj", "kv_proj", "out_proj"]}},
        {"frozen_layers": 1},
    ],
)
def test_an_interrupted_fine_tuning_is_the_same(pretrained: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    runs = [classifier(pretrained, tmp_path / name, **settings, save={"every": 2}) for name in ("whole", "stopped")]
    full = go(runs[0], opened=opened("classification")).load()
    stopped(runs[1], 2, opened=opened("classification"))
    resumed = go(runs[1], opened=opened("classification")).load()
    assert learned(tmp_path / "whole") == learned(tmp_path / "stopped")
    for name, value in full.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_adapters_are_trained_and_merged(pretrained: Path, tmp_path: Path) -> None:
    run = classifier(pretrained, tmp_path, lora={"rank": 2, "parts": ["q_proj", "kv_proj"]})
    go(run, opened=opened("classification"))
    before, after = mf.load(pretrained).state_dict(), mf.load(tmp_path).state_dict()
    changed = {name for name in after if name in before and not torch.equal(before[name], after[name])}
    body = {name for name in changed if not name.startswith("head.")}
    assert body == {name for name in after if name.endswith(("q_proj.weight", "kv_proj.weight"))}
    assert len(body) == 6
    for name in body:
        added = after[name] - before[name]
        # one adapter for queries, one for keys and one for values
        for block in added.chunk(2 if "kv_proj" in name else 1):
            assert torch.linalg.matrix_rank(block, atol=1e-5) == 2
    assert not any("lora" in name for name in after)
