"""The optimizer of a run, its parameter groups for weight decay and epsilon, and its state."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from manyformer.base.files.json_records import DamagedFile
from manyformer.config import AdadeltaConfig, AdagradConfig, AdamWConfig, OptimConfig
from manyformer.nn.runtime.training_hooks import OwnLearningRate, OwnOptimizerEpsilon, UndecayedParameters
from manyformer.training.layers import layer_depths

LR_SCALE = "lr_scale"

_STATE_KINDS: dict[type[torch.optim.Optimizer], set[str]] = {
    torch.optim.Adam: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.AdamW: {"step", "exp_avg", "exp_avg_sq"},
    torch.optim.Adagrad: {"step", "sum"},
    torch.optim.Adadelta: {"step", "square_avg", "acc_delta"},
}
"""The tensors that each optimizer keeps for a weight."""


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build the optimizer over all trainable weights; the learning rate is set before every step.

    AdamW and Adam are fused, on a CPU five times faster than torch's default form. Only what multiplies
    activations has weight decay (`weight_decay_groups`). Adam adds the gradient of its
    L2 penalty to that of the loss. Raises UserError for `layer_decay` where layers have no depth.
    """
    own_scale = {
        weight: part.lr_scale
        for part in model.modules()
        if isinstance(part, OwnLearningRate)
        for weight in part.parameters(recurse=False)
    }
    scales = _learning_rate_scales(model, config.layer_decay, own_scale)
    if isinstance(config, AdagradConfig | AdadeltaConfig):
        return _scaled_by_history(model, config, scales)
    if isinstance(config, AdamWConfig):
        decay = config.weight_decay
    else:
        decay = config.l2
    own_eps = {
        weight: part.optimizer_eps
        for part in model.modules()
        if isinstance(part, OwnOptimizerEpsilon)
        for weight in part.parameters(recurse=False)
    }
    groups: dict[tuple[float, float, float], list[nn.Parameter]] = {}
    for weights, group_decay in zip(weight_decay_groups(model), (decay, 0.0), strict=True):
        for weight in weights:
            if weight in own_eps or weight in own_scale:
                weight_decay = 0.0
            else:
                weight_decay = group_decay
            key = weight_decay, own_eps.get(weight, config.eps), scales[weight]
            # weights with equal settings share a group, which is updated by one kernel
            groups.setdefault(key, []).append(weight)
    param_groups = [
        {"params": weights, "weight_decay": decay, "eps": eps, LR_SCALE: scale}
        for (decay, eps, scale), weights in groups.items()
    ]
    # the rate is set before every step: 0 until then
    kind = torch.optim.AdamW if isinstance(config, AdamWConfig) else torch.optim.Adam
    return kind(param_groups, lr=0.0, betas=config.betas, fused=True)


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


def _scaled_by_history(
    model: nn.Module, config: AdagradConfig | AdadeltaConfig, scales: Mapping[nn.Parameter, float]
) -> torch.optim.Optimizer:
    """Adagrad or Adadelta, one epsilon for all weights, without weight decay."""
    groups: dict[float, list[nn.Parameter]] = {}
    for weight in model.parameters():
        if weight.requires_grad:
            groups.setdefault(scales[weight], []).append(weight)
    param_groups = [{"params": weights, LR_SCALE: scale} for scale, weights in groups.items()]
    if isinstance(config, AdagradConfig):
        return torch.optim.Adagrad(param_groups, lr=0.0, eps=config.eps)
    return torch.optim.Adadelta(param_groups, lr=0.0, rho=config.rho, eps=config.eps)


def clip_each_gradient(weights: Sequence[nn.Parameter], max_norm: float) -> None:
    """Scale the gradient of each weight by itself to a norm of at most `max_norm` (Pascanu et al. 2013)."""
    for weight in weights:
        nn.utils.clip_grad_norm_(weight, max_norm)


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


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors under `NAME/KIND`, such as `body.0.ff.down.weight/exp_avg`."""
    return {
        f"{name}/{kind}": value
        for name, weight in model.named_parameters()
        for kind, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], file: Path
) -> None:
    """Restore the tensors of `named_optimizer_state`, read from `file`. Raises DamagedFile if they do not fit."""
    weights = dict(model.named_parameters())
    state_kinds = _STATE_KINDS[type(optimizer)]
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        if name in weights and kind != "step":
            expected = weights[name].shape
        else:
            expected = torch.Size()
        if name not in weights or kind not in state_kinds or value.shape != expected:
            raise DamagedFile(f"{file} is damaged: {key:.80} {tuple(value.shape)} fits no weight of the model")
        # torch takes a state with one part for a whole one, and would fail at the next step
        if any(f"{name}/{kind_name}" not in tensors for kind_name in state_kinds):
            raise DamagedFile(f"{file} is damaged: a part of the state of {name} is missing")
        weight = weights[name]
        # a copy: tensors in a file's memory map are aligned differently, which can change the last bit of a sum
        optimizer.state[weight][kind] = value.to(weight.device, copy=True)
