"""Which optimizer trains which weight, groups of weights by pattern, and the state of every kind in checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import a_run, make
from pydantic import ValidationError
from runs import go, learned, stopped
from torch import nn

import manyformer as mf
from manyformer.analysis.own_models import OwnSubject, build_tiny, find_own_subject
from manyformer.base.errors import UserError
from manyformer.base.files.json_records import DamagedFile
from manyformer.base.files.verified_folder import write_manifest
from manyformer.config import (
    AdafactorConfig,
    AdamWConfig,
    LionConfig,
    LoraConfig,
    MuonConfig,
    OptimConfig,
    ParameterGroup,
    RunConfig,
    SGDConfig,
)
from manyformer.conversion.surgery.lora import attach_lora
from manyformer.models.tasks import ToyDraw
from manyformer.recipes import RECIPES
from manyformer.training.engine import TrainingEngine, set_learning_rate
from manyformer.training.optimizers import (
    clip_gradient_values,
    make_optimizer,
    named_optimizer_state,
    restore_optimizer_state,
)
from manyformer.training.parameter_rules import ParameterRule, matches, parameter_rules
from manyformer.training.process_group import DDPStrategy
from manyformer.training.sharded_checkpoints import read_shards, write_shards

MUON = MuonConfig(lr=0.02)

CONVOLUTIONS_ALONE = "tc-resnet"
"""The recipe without a matrix in its layers."""

NAMES = sorted(set(RECIPES) - {CONVOLUTIONS_ALONE})

NEW = [MUON, SGDConfig(lr=0.1), LionConfig(lr=1e-3), AdafactorConfig(lr=0.01)]


def rules_of(recipe: str, config: OptimConfig = MUON) -> dict[str, ParameterRule]:
    return {rule.name: rule for rule in parameter_rules(build_tiny(recipe, {}, 0), config)}


def small() -> nn.Module:
    return mf.build("transformer-lm", vocab=11, dim=16, depth=2, heads=2)


@pytest.mark.parametrize("recipe", NAMES)
def test_every_weight_of_every_recipe_has_one_optimizer(recipe: str) -> None:
    model = build_tiny(recipe, {}, 0)
    rules = parameter_rules(model, MUON)
    assert [rule.name for rule in rules] == [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert {rule.kind for rule in rules} == {"muon", "adamw"}
    optimizer = make_optimizer(model, MUON)
    grouped = [id(weight) for group in optimizer.param_groups for weight in group["params"]]
    assert sorted(grouped) == sorted(id(rule.weight) for rule in rules)
    # whatever has few axes, or stands where tokens come in and scores go out, is no matrix of a hidden layer
    for rule in rules:
        if rule.kind == "muon":
            assert rule.weight.ndim in (2, 3)
            assert min(rule.weight.shape) > 1
            assert not rule.name.startswith(("embed", "head", "policy_head", "value_head", "projections"))
            assert not any(word in rule.name for word in ("router", "norm", "position.weight", "short_convolution"))


@pytest.mark.parametrize(
    ("recipe", "end", "kind"),
    [
        ("transformer-lm", "ff.inner.up.weight", "muon"),
        ("transformer-lm", "embed.token.weight", "adamw"),
        ("mixtral", "experts.gate.weight", "muon"),
        ("mixtral", "router.proj.weight", "adamw"),
        ("deltanet", "short_convolution.weight", "adamw"),
        ("qwen3-next", "shared.gate.weight", "adamw"),
        ("mamba", "in_proj.weight", "muon"),
        ("mamba", "dt_proj.weight", "adamw"),
        ("t5", "position.weight", "adamw"),
        ("lstm-lm", "cells.weight_hh_l0", "muon"),
        ("mlstm", "input.up.weight", "adamw"),
        ("bert", "head.transform.0.weight", "adamw"),
        ("clip", "towers.text.0.ff.inner.up.weight", "muon"),
        ("clip", "projections.text.weight", "adamw"),
    ],
)
def test_owners_decide(recipe: str, end: str, kind: str) -> None:
    matching = {name: rule.kind for name, rule in rules_of(recipe).items() if name.endswith(end)}
    assert matching, end
    assert set(matching.values()) == {kind}


def test_a_tied_head_is_an_embedding() -> None:
    model: Any = small()
    assert model.head.weight is model.embed.token.weight
    rules = parameter_rules(model, MUON)
    assert [rule.kind for rule in rules if rule.weight is model.head.weight] == ["adamw"]


def test_a_linear_layer_shared_with_the_head_is_no_hidden_matrix() -> None:
    model: Any = small()
    model.other_head = model.body.get_submodule("0").ff.inner.up
    kinds = {rule.name: rule.kind for rule in parameter_rules(model, MUON)}
    assert kinds["body.0.ff.inner.up.weight"] == "adamw"
    assert kinds["body.1.ff.inner.up.weight"] == "muon"


def test_modules_of_others_have_their_matrices_in_lists() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Embedding(7, 8)
            self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(2))
            self.out = nn.Linear(8, 7)

    kinds = {rule.name: rule.kind for rule in parameter_rules(Own(), MUON)}
    assert {name for name, kind in kinds.items() if kind == "muon"} == {"blocks.0.1.weight", "blocks.1.1.weight"}


def test_muon_without_a_matrix_is_refused() -> None:
    with pytest.raises(UserError, match=r"optim.name=muon has nothing to do: no trained weight is a matrix"):
        rules_of(CONVOLUTIONS_ALONE)
    model = small()
    attach_lora(model, LoraConfig(rank=2))
    # adapters are trained by AdamW, so that nothing is left
    with pytest.raises(UserError, match=r"use optim.name=adamw"):
        make_optimizer(model, MUON)


def test_layers_have_rates_of_their_own_with_both_optimizers() -> None:
    model = small()
    rules = {rule.name: rule for rule in parameter_rules(model, MuonConfig(lr=0.02, adamw_lr=0.01, layer_decay=0.5))}
    assert rules["body.1.ff.inner.up.weight"].lr_scale == pytest.approx(0.5)
    assert rules["body.0.ff.inner.up.weight"].lr_scale == pytest.approx(0.25)
    assert rules["body.0.ff.inner.up.bias"].lr_scale == pytest.approx(0.125)
    optimizer = make_optimizer(model, MuonConfig(lr=0.02, adamw_lr=0.01))
    set_learning_rate(optimizer, 0.002)
    assert {group["kind"]: group["lr"] for group in optimizer.param_groups} == pytest.approx(
        {"muon": 0.002, "adamw": 0.001}
    )


def test_weight_decay_of_the_two_optimizers() -> None:
    rules = {rule.name: rule for rule in parameter_rules(small(), MUON)}
    assert rules["body.0.ff.inner.up.weight"].weight_decay == 0.005
    assert rules["embed.token.weight"].weight_decay == rules["body.0.ff.inner.up.bias"].weight_decay == 0.0
    matched = rules_of("mixtral", MuonConfig(lr=0.003, scale="match_rms_adamw"))
    assert {rule.weight_decay for rule in matched.values() if rule.kind == "muon"} == {0.03}
    assert {rule.weight_decay for name, rule in matched.items() if "router.proj.weight" in name} == {0.1}


def test_groups_change_what_their_patterns_match() -> None:
    groups = (
        ParameterGroup(match="body.1.*", lr_scale=0.5),
        ParameterGroup(match="/up|down/", weight_decay=0.3),
        ParameterGroup(match="q_proj.weight", optimizer="adamw"),
        ParameterGroup(match="embed.token.weight", weight_decay=0.2),
    )
    rules = {rule.name: rule for rule in parameter_rules(small(), MuonConfig(lr=0.02, adamw_lr=0.01, groups=groups))}
    top, low = rules["body.1.ff.inner.up.weight"], rules["body.0.ff.inner.up.weight"]
    # the first pattern that matches decides
    assert (top.lr_scale, top.weight_decay) == (0.5, 0.005)
    assert (low.lr_scale, low.weight_decay, low.reason) == (1.0, 0.3, "optim.groups: /up|down/")
    assert rules["body.0.ff.inner.up.bias"].weight_decay == 0.3
    assert rules["body.0.attention.inner.q_proj.weight"].kind == "adamw"
    assert rules["body.0.attention.inner.kv_proj.weight"].kind == "muon"
    # a table that decays because somebody says so
    assert rules["embed.token.weight"].weight_decay == 0.2


def test_patterns() -> None:
    name = "body.0.ff.inner.up.weight"
    assert all(matches(pattern, name) for pattern in (name, "body.*", "up.weight", "inner.*", r"/\.up\./", "/^body/"))
    assert not any(matches(pattern, name) for pattern in ("up", "p.weight", "/^up/", "BODY.*"))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"match": "*nrm*"}], r"the pattern '\*nrm\*' matches no trained weight; their names are such as embed"),
        ([{"match": "*"}, {"match": "body.*"}], r"the pattern 'body.\*' decides nothing: earlier patterns match all"),
        ([{"match": "up.bias", "optimizer": "muon"}], r"muon orthogonalizes matrices, and body.0.* has the shape"),
    ],
)
def test_patterns_that_decide_nothing_are_refused(groups: list[dict[str, Any]], message: str) -> None:
    config = MuonConfig(lr=0.02, groups=tuple(ParameterGroup(**group) for group in groups))
    with pytest.raises(UserError, match=message):
        make_optimizer(small(), config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": {"name": "adamw", "groups": [{"match": "*", "optimizer": "muon"}]}}, "it needs optim.name=muon"),
        (
            {"optim": {"name": "adagrad", "groups": [{"match": "*", "weight_decay": 1.0}]}},
            "adagrad has no weight decay",
        ),
        ({"optim": {"groups": [{"match": "/(/"}]}}, "is no regular expression"),
        ({"optim": {"name": "muon"}, "schedule": {"name": "noam"}}, "noam sets one learning rate, and Muon has two"),
        ({"optim": {"name": "sgd", "nesterov": True, "momentum": 0.0}}, "needs optim.momentum above 0"),
        ({"optim": {"name": "adafactor"}, "devices": 2, "strategy": "fsdp"}, "must not be fsdp with adafactor"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"recipe": "transformer-lm", **settings})


def test_rates_by_default() -> None:
    def rate(**optim: Any) -> float | None:
        return RunConfig.model_validate({"recipe": "transformer-lm", "optim": optim}).optim.lr

    assert [rate(name=name) for name in ("muon", "sgd", "lion", "adafactor")] == [0.02, 0.1, 1e-4, 0.01]
    assert rate(name="muon", scale="match_rms_adamw") == 0.003


def test_values_of_gradients_are_clipped_before_their_norm() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([30.0, -0.4])
    clip_gradient_values([weight], 0.3)
    assert weight.grad.tolist() == pytest.approx([0.3, -0.3])
    torch.manual_seed(0)
    engine = TrainingEngine(
        mf.build("transformer-lm", vocab=11, dim=16, depth=1, heads=2),
        SGDConfig(lr=1.0, momentum=0.0, max_grad_value=1e-3, max_grad_norm=1e-2),
        DDPStrategy(),
    )
    before = [weight.detach().clone() for weight in engine.weights]
    engine.step([make("language-model", 1)], 1.0)
    steps = torch.cat([(a - b).flatten() for a, b in zip(before, engine.weights)]).detach()
    # more than a hundred numbers reach the limit, so that the norm is clipped after them
    assert steps.norm().item() == pytest.approx(1e-2, rel=1e-3)
    assert steps.abs().max() < 1e-3


@pytest.mark.parametrize("optim", NEW, ids=lambda optim: optim.name)
def test_an_interruption_changes_nothing(optim: OptimConfig, tmp_path: Path) -> None:
    settings = {
        "optim": {**optim.model_dump(), "groups": [{"match": "*bias*", "lr_scale": 0.5}]},
        "limits": {"steps": 7},
        "save": {"every": 3},
    }
    if isinstance(optim, MuonConfig):
        settings["optim"]["normuon"] = 0.9
    go(a_run(tmp_path / "whole", **settings))
    stopped(a_run(tmp_path / "run", **settings), 3)
    go(a_run(tmp_path / "run", **settings))
    assert learned(tmp_path / "run") == learned(tmp_path / "whole")
    weights = [(tmp_path / name / "model/model.safetensors").read_bytes() for name in ("run", "whole")]
    assert weights[0] == weights[1]


def one_step(optim: OptimConfig) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    engine = TrainingEngine(mf.build("transformer-lm", vocab=11, dim=16, depth=1, heads=2), optim, DDPStrategy())
    engine.step([make("language-model", 1)], 0.01)
    return engine.model, engine.optimizer


@pytest.mark.parametrize("optim", NEW, ids=lambda optim: optim.name)
def test_the_state_of_another_optimizer_is_refused(optim: OptimConfig, tmp_path: Path) -> None:
    model, optimizer = one_step(AdamWConfig())
    theirs = named_optimizer_state(model, optimizer)
    model, optimizer = one_step(optim)
    ours = named_optimizer_state(model, optimizer)
    restore_optimizer_state(model, optimizer, dict(ours), tmp_path)
    damaged = "fits no weight of the model|a part of the state of .* is missing"
    with pytest.raises(DamagedFile, match=damaged):
        restore_optimizer_state(model, optimizer, theirs, tmp_path)
    with pytest.raises(DamagedFile, match=damaged):
        restore_optimizer_state(*one_step(AdamWConfig()), ours, tmp_path)


def test_nothing_of_a_matrix_with_normuon_may_be_missing(tmp_path: Path) -> None:
    model, optimizer = one_step(MuonConfig(lr=0.02, normuon=0.95))
    state = named_optimizer_state(model, optimizer)
    del state["body.0.ff.inner.up.weight/row_moments"]
    with pytest.raises(DamagedFile, match=r"a part of the state of body.0.ff.inner.up.weight is missing"):
        restore_optimizer_state(model, optimizer, state, tmp_path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_with_the_state_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    model, optimizer = one_step(MUON)
    folder = tmp_path / "shards"
    folder.mkdir()
    write_shards(model, optimizer, folder)
    write_manifest(folder)
    read_shards(model, optimizer, folder)
    with pytest.raises(UserError, match=r"/momentum_buffer .* is of another optimizer than the run's"):
        read_shards(*one_step(AdamWConfig()), folder)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", NAMES)
def test_every_recipe_takes_two_steps(recipe: str) -> None:
    subject = find_own_subject(recipe, {}, 0)
    assert isinstance(subject, OwnSubject)
    model = subject.model
    engine = TrainingEngine(model, MUON, DDPStrategy())
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for seed in (1, 2):
        length = max(48 // subject.length_multiple, 1) * subject.length_multiple
        draw = ToyDraw.make(torch.Generator().manual_seed(seed), torch.device("cpu"), length)
        batch, _ = subject.task.toy(model, draw)
        engine.step([batch], 0.01)
    rules = parameter_rules(model, MUON)
    assert engine.non_finite_tensors() == []
    still = {rule.name for rule in rules if torch.equal(rule.weight, before[rule.name])}
    # what has no gradient stays, and nothing else
    for name in still:
        state = engine.optimizer.state.get(dict(model.named_parameters())[name], {})
        assert not any(value.any() for kind, value in state.items() if kind != "step"), name
    assert {rule.kind for rule in rules if rule.name not in still} == {"muon", "adamw"}
