"""Which optimizer trains which weight of a model, and with which learning rate, weight decay and epsilon.

The owner of a weight decides, not its shape: a table of positions, taps of a convolution and the gates of heads have
two axes as a projection has. Patterns of `optim.groups` come before all other rules."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from manyformer.base.errors import UserError
from manyformer.config import AdamConfig, AdamWConfig, LionConfig, MuonConfig, OptimConfig, ParameterGroup, SGDConfig
from manyformer.config.training_sections import AdafactorConfig, OptimizerKind
from manyformer.nn.core import Layer
from manyformer.nn.feed_forward.mixture_of_experts import ExpertLinear
from manyformer.nn.runtime.training_hooks import (
    OptimizerHints,
    OwnLearningRate,
    OwnOptimizerEpsilon,
    UndecayedParameters,
)
from manyformer.training.layers import layer_depths

LINEAR = "matrices of linear layers inside the layers"
EXPERTS = "matrices of experts, each by itself"
DECLARED_MATRIX = "matrices that their layer names"
VECTOR = "vectors and numbers"
DECLARED_OTHER = "routers, gates and tables that their layer names"
NARROW = "matrices of one row or one column"
OUTSIDE = "embeddings, heads and all else outside of the layers"
OTHER = "tables, taps, gates and other weights that are no linear layer's"
OWN_STEPS = "weights with a learning rate or epsilon of their own"
ONE_KIND = "all weights"


@dataclass(frozen=True)
class ParameterRule:
    """How one weight is trained: the optimizer and why, the factor on the learning rate, the decay, and Adam's epsilon.

    A weight with several names has the first."""

    name: str
    weight: nn.Parameter
    kind: OptimizerKind
    reason: str
    lr_scale: float
    weight_decay: float
    eps: float | None


def parameter_rules(
    model: nn.Module, config: OptimConfig, rate_scales: Mapping[str, float] | None = None
) -> list[ParameterRule]:
    """The rule of every trainable weight, in the order of the model; `rate_scales` are further factors by name.

    Raises UserError for `layer_decay` where layers have no depth, for a pattern of `optim.groups` that decides nothing,
    and for Muon where it would train no weight or one that is no matrix."""
    own_scale = _of_owners(model, OwnLearningRate, "lr_scale")
    own_eps = _of_owners(model, OwnOptimizerEpsilon, "optimizer_eps")
    scales = _learning_rate_scales(model, config.layer_decay, own_scale)
    decayed = set(weight_decay_groups(model)[0])
    chosen = _groups_of_weights(model, config.groups)
    kinds = _kinds(model, config, own_scale.keys() | own_eps.keys())
    rules = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        kind, reason = kinds[weight]
        group = None
        if weight in chosen:
            group = config.groups[chosen[weight]]
            reason = f"optim.groups: {group.match}"
            kind = group.optimizer or kind
        decay = 0.0
        if weight in decayed and weight not in own_eps and weight not in own_scale:
            decay = decay_of(config, kind)
        if group is not None and group.weight_decay is not None:
            decay = group.weight_decay
        lr_scale = scales[weight] * _rate_ratio(config, kind)
        if group is not None:
            lr_scale *= group.lr_scale
        if rate_scales:
            lr_scale *= rate_scales[name]
            # the decay of a step is the product with the rate, and is to be that of the base model
            decay /= rate_scales[name]
        weight_eps = None
        if isinstance(config, AdamConfig | AdamWConfig | MuonConfig):
            weight_eps = own_eps.get(weight, config.eps)
        rules.append(ParameterRule(name, weight, kind, reason, lr_scale, decay, weight_eps))
    _check_muon(rules, config)
    return rules


def decay_of(config: OptimConfig, kind: OptimizerKind) -> float:
    """The weight decay of the weights that decay, or the factor of their L2 penalty."""
    if isinstance(config, MuonConfig):
        if kind == "muon":
            return config.decay
        return config.adamw_weight_decay
    if isinstance(config, AdamConfig):
        return config.l2
    if isinstance(config, AdamWConfig | SGDConfig | LionConfig | AdafactorConfig):
        return config.weight_decay
    return 0.0


def _rate_ratio(config: OptimConfig, kind: OptimizerKind) -> float:
    """The learning rate of an optimizer beside Muon, as a multiple of Muon's: both follow one schedule."""
    if isinstance(config, MuonConfig) and kind == "adamw" and config.lr is not None:
        return config.adamw_lr / config.lr
    return 1.0


def _kinds(
    model: nn.Module, config: OptimConfig, own_steps: set[nn.Parameter]
) -> Mapping[nn.Parameter, tuple[OptimizerKind, str]]:
    """The optimizer of each weight without `optim.groups`, and the rule that says so."""
    if not isinstance(config, MuonConfig):
        return dict.fromkeys(model.parameters(), (config.name, ONE_KIND))
    matrices, excluded = _hinted(model)
    inside = _weights_inside_layers(model)
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            owners.setdefault(weight, []).append(module)
    kinds: dict[nn.Parameter, tuple[OptimizerKind, str]] = {}
    for weight in model.parameters():
        if weight.ndim < 2:
            kinds[weight] = ("adamw", VECTOR)
        elif weight in own_steps:
            kinds[weight] = ("adamw", OWN_STEPS)
        elif weight in excluded:
            kinds[weight] = ("adamw", DECLARED_OTHER)
        elif weight in matrices:
            kinds[weight] = ("muon", DECLARED_MATRIX)
        # by identity: a head tied to an embedding has two owners
        elif weight not in inside:
            kinds[weight] = ("adamw", OUTSIDE)
        elif all(isinstance(owner, ExpertLinear) for owner in owners[weight]) and weight.ndim == 3:
            kinds[weight] = ("muon", EXPERTS)
        elif not all(isinstance(owner, nn.Linear) for owner in owners[weight]):
            kinds[weight] = ("adamw", OTHER)
        elif min(weight.shape) < 2:
            kinds[weight] = ("adamw", NARROW)
        else:
            kinds[weight] = ("muon", LINEAR)
    return kinds


def _hinted(model: nn.Module) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """The weights that modules name as matrices of hidden layers, and those that they name as none."""
    matrices: set[nn.Parameter] = set()
    excluded: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, OptimizerHints):
            by_name = dict(module.named_parameters())
            matrices.update(by_name[name] for name in module.hidden_matrices if name in by_name)
            excluded.update(by_name[name] for name in module.adamw_weights if name in by_name)
    return matrices, excluded


def _weights_inside_layers(model: nn.Module) -> set[nn.Parameter]:
    """The weights without a place outside of the layers; in a model of others, outside of its lists of modules."""
    kind = Layer if any(isinstance(module, Layer) for module in model.modules()) else nn.ModuleList
    containers: set[nn.Module] = {module for module in model.modules() if isinstance(module, kind)}
    outside = {weight for module in _outside(model, containers) for weight in module.parameters(recurse=False)}
    return set(model.parameters()) - outside


def _outside(module: nn.Module, containers: set[nn.Module]) -> Iterator[nn.Module]:
    """The module and those below it, without any of the containers; one that stands in several places each time."""
    yield module
    for child in module.children():
        if child not in containers:
            yield from _outside(child, containers)


def _check_muon(rules: Sequence[ParameterRule], config: OptimConfig) -> None:
    if not isinstance(config, MuonConfig):
        return
    matrices = [rule for rule in rules if rule.kind == "muon"]
    for rule in matrices:
        if rule.weight.ndim not in (2, 3):
            shape = tuple(rule.weight.shape)
            raise UserError(f"{rule.reason}: muon orthogonalizes matrices, and {rule.name} has the shape {shape}")
    if rules and not matrices:
        raise UserError(
            "optim.name=muon has nothing to do: no trained weight is a matrix of a hidden layer; use optim.name=adamw, "
            "or name matrices in optim.groups with optimizer: muon"
        )


def _groups_of_weights(model: nn.Module, groups: Sequence[ParameterGroup]) -> dict[nn.Parameter, int]:
    """The number of the first pattern that matches each weight, by any of its names."""
    chosen: dict[nn.Parameter, int] = {}
    places = [(name, weight) for name, weight in model.named_parameters(remove_duplicate=False) if weight.requires_grad]
    for number, group in enumerate(groups):
        matching = {weight for name, weight in places if matches(group.match, name)}
        setting = f"optim.groups: the pattern '{group.match}'"
        if not matching:
            examples = ", ".join(name for name, _ in places[:3])
            raise UserError(f"{setting} matches no trained weight; their names are such as {examples}")
        undecided = matching - chosen.keys()
        if not undecided:
            raise UserError(f"{setting} decides nothing: earlier patterns match all of its weights")
        chosen.update(dict.fromkeys(undecided, number))
    return chosen


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern of `optim.groups` matches the name of a weight, or its end after a dot.

    A pattern in slashes is a regular expression that is searched for in the name; all others are globs."""
    if len(pattern) > 2 and pattern.startswith("/") and pattern.endswith("/"):
        return re.search(pattern[1:-1], name) is not None
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _of_owners(model: nn.Module, kind: type, attribute: str) -> dict[nn.Parameter, float]:
    """What modules of a kind say about their own parameters."""
    return {
        weight: getattr(part, attribute)
        for part in model.modules()
        if isinstance(part, kind)
        for weight in part.parameters(recurse=False)
    }


def _learning_rate_scales(
    model: nn.Module, layer_decay: float | None, own_scale: Mapping[nn.Parameter, float]
) -> dict[nn.Parameter, float]:
    """The factor of each weight on the learning rate: that of its module, and `layer_decay` for each layer above it."""
    if layer_decay is None:
        return {weight: own_scale.get(weight, 1.0) for weight in model.parameters()}
    depths = layer_depths(model, "optim.layer_decay")
    return {
        weight: own_scale.get(weight, 1.0) * layer_decay ** (depths.top - depths.by_weight[weight])
        for weight in model.parameters()
    }


def weight_decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable weights into those with and those without weight decay.

    What multiplies activations decays: matrices and convolutions. The rest does not: vectors and numbers, biases of any
    shape, lookup tables (an output that is tied to one too), position encodings, and what a module declares by
    `UndecayedParameters`."""
    exempt = {id(weight) for module in model.modules() for weight in _undecayed_of(module)}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for weight in model.parameters():
        if not weight.requires_grad:
            continue
        if weight.ndim >= 2 and id(weight) not in exempt:
            decayed.append(weight)
        else:
            undecayed.append(weight)
    return decayed, undecayed


def _undecayed_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that do not decay because of what this module is or says, whatever their shape."""
    if isinstance(module, UndecayedParameters):
        undecayed = module.undecayed
    else:
        undecayed = ()
    if undecayed is None or isinstance(module, nn.Embedding):
        return list(module.parameters())
    # a bias never decays, whether a module names it or not
    names = ("bias", *undecayed)
    by_name = dict(module.named_parameters(recurse=False))
    return [by_name[name] for name in names if name in by_name]
