"""Which parameters of every recipe decay: those that multiply activations, written down by what they are."""

from collections import defaultdict

import pytest
import torch
from torch import nn

import manyformer as mf
from manyformer.analysis.own_models import build_tiny
from manyformer.config import AdamWConfig
from manyformer.models import Model
from manyformer.nn.positions import Position
from manyformer.nn.runtime.training_hooks import UndecayedParameters, fused_row_parts
from manyformer.recipes import recipe_names
from manyformer.training.optimizers import make_optimizer
from manyformer.training.parameter_rules import weight_decay_groups

DECAYED = {
    # projections and convolutions
    "Linear.weight",
    "Conv1d.weight",
    "Conv2d.weight",
    "ConvolutionModule.depthwise",
    "ShortConvolution.weight",
    "NystromKernel.weight",
    "ClassHead.weight",
    "CappedClassHead.weight",
    "ExpertLinear.weight",
    "ScaledLinear.weight",
    "FeatureEmbedding.weight",
    "StepProjection.weight",
    # matrices of gates and recurrences
    "GRUGate.branch_weight",
    "GRUGate.candidate_weight",
    "GRUGate.stream_weight",
    "LSTM.weight_hh_l0",
    "LSTM.weight_ih_l0",
    # matrices over tokens, heads and blocks
    "CollaborativeAttention.mixing",
    "LearnedLengthProjection.weight",
    "MLPSorting.down",
    "MLPSorting.up",
    "PairTable.weight",
    # products of each head with a node's features
    "AdditiveScores.source",
    "AdditiveScores.target",
}
"""What decays in some recipe, as the class of its module and its name there."""


def kinds_by_parameter(model: nn.Module) -> dict[str, set[str]]:
    """The class and the name of each parameter in the modules that own it; a tied one has several owners."""
    kinds: dict[int, set[str]] = defaultdict(set)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kinds[id(parameter)].add(f"{type(module).__name__}.{name}")
    return {name: kinds[id(parameter)] for name, parameter in model.named_parameters()}


def decayed_names(model: Model) -> set[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = make_optimizer(model, AdamWConfig(weight_decay=0.1)).param_groups
    return {names[id(weight)] for group in groups if group["weight_decay"] for weight in group["params"]}


@pytest.mark.parametrize("recipe", sorted(recipe_names()))
def test_what_decays_is_written_down(recipe: str) -> None:
    model = build_tiny(recipe, {}, 0)
    in_positions = {id(p) for module in model.modules() if isinstance(module, Position) for p in module.parameters()}
    kinds, decayed = kinds_by_parameter(model), decayed_names(model)
    expected = {
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and kinds[name] <= DECAYED and id(parameter) not in in_positions
    }
    assert decayed == expected


@pytest.mark.parametrize(
    ("recipe", "end"),
    [
        ("gpt-oss", "experts.gate.bias"),
        ("sinkhorn-encoder", "sorting.shift"),
        ("rwkv-7", "shift.mix"),
        ("nsa", "compress_keys.places"),
        ("vit", "embed.leading"),
        ("etc", "body.vectors"),
        ("perceiver-classifier", "latents"),
        ("multimodal-transformer", "bottleneck"),
        ("graphormer-classifier", "encoding.path"),
        ("graphormer-classifier", "encoding.virtual_node"),
        ("gmlp-encoder", "mixer.inner.weights.weight"),
        ("hgrn2", "logits"),
    ],
)
def test_tables_tokens_and_biases_do_not_decay(recipe: str, end: str) -> None:
    model = build_tiny(recipe, {}, 0)
    named = {name for name, parameter in model.named_parameters() if name.endswith(end) and parameter.ndim >= 2}
    assert named
    assert not named & decayed_names(model)


def test_an_output_tied_to_a_table_does_not_decay() -> None:
    model = mf.build("transformer-lm", vocab=11, dim=8, depth=1, heads=1)
    tied = {name for name, kinds in kinds_by_parameter(model).items() if len(kinds) > 1}
    assert tied
    assert not tied & decayed_names(model)


def test_names_and_rows_that_a_module_declares_are_those_of_its_parameters() -> None:
    for recipe in recipe_names():
        model = build_tiny(recipe, {}, 0)
        for module in model.modules():
            if isinstance(module, UndecayedParameters):
                assert all(hasattr(module, name) for name in module.undecayed or ())
        rows = {name: len(weight) for name, weight in model.named_parameters() if weight.ndim}
        parts = fused_row_parts(model)
        assert {name: sum(sizes) for name, sizes in parts.items()} == {name: rows[name] for name in parts}
        # of compressed keys and values the rows of each head follow one another
        whole = {name for name in rows if name.endswith("kv_proj.weight")} - parts.keys()
        assert not whole or recipe.startswith(("deepseek", "kimi-linear"))


def test_modules_of_others_declare_theirs() -> None:
    class Slots(nn.Module, UndecayedParameters):
        undecayed = ("slots",)

        def __init__(self) -> None:
            super().__init__()
            self.slots, self.bias = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, 1, 4))
            self.mix = nn.Parameter(torch.ones(4, 4))

    module = Slots()
    decayed, undecayed = weight_decay_groups(module)
    assert [id(weight) for weight in decayed] == [id(module.mix)]
    assert {id(weight) for weight in undecayed} == {id(module.slots), id(module.bias)}
