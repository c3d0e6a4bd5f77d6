"""The optimizer of a run: fused Adam or AdamW, parameter groups for weight decay and epsilon, and its state."""

from typing import Any

import torch
from torch import Tensor, nn

from manyformer.config import AdamWConfig, OptimConfig
from manyformer.position import Position
from manyformer.training_hooks import OwnOptimizerEpsilon


def make_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """Build fused AdamW or Adam over all trainable weights; on a CPU five times faster than torch's default form.

    The learning rate is set before every step. Only matrices have weight decay: biases, norms and lookup tables
    (embeddings, an output tied to one, positions) do not.
    """
    options: dict[str, Any] = {"lr": 0.0, "betas": config.betas, "eps": config.eps, "fused": True}
    weights_by_eps = own_epsilon_groups(model)
    own_eps_ids = {id(weight) for weights in weights_by_eps.values() for weight in weights}
    own_eps_groups: list[dict[str, Any]] = [{"params": weights, "eps": eps} for eps, weights in weights_by_eps.items()]
    if not isinstance(config, AdamWConfig):
        weights_with_default_eps = [
            weight for weight in model.parameters() if weight.requires_grad and id(weight) not in own_eps_ids
        ]
        return torch.optim.Adam([{"params": weights_with_default_eps}, *own_eps_groups], **options)
    decayed, undecayed = (
        [weight for weight in group if id(weight) not in own_eps_ids] for group in weight_decay_groups(model)
    )
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed},
        *own_eps_groups,
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0, **options)


def own_epsilon_groups(model: nn.Module) -> dict[float, list[nn.Parameter]]:
    """Group the weights of modules with their own epsilon by that epsilon (see `OwnOptimizerEpsilon`)."""
    groups: dict[float, list[nn.Parameter]] = {}
    assigned: set[int] = set()
    for part in model.modules():
        if isinstance(part, OwnOptimizerEpsilon):
            part_weights = [w for w in part.parameters(recurse=False) if w.requires_grad and id(w) not in assigned]
            groups.setdefault(part.optimizer_eps, []).extend(part_weights)
            assigned.update(map(id, part_weights))
    return {eps: weights for eps, weights in groups.items() if weights}


def weight_decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split the trainable weights into those with and those without weight decay."""
    tables = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | Position)
        for weight in module.parameters()
    }
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for weight in model.parameters():
        if weight.requires_grad:
            (decayed if weight.ndim >= 2 and id(weight) not in tables else undecayed).append(weight)
    return decayed, undecayed


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def named_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's tensors under `NAME/KIND`, such as `body.0.ff.down.weight/exp_avg`."""
    return {
        f"{name}/{kind}": value
        for name, weight in model.named_parameters()
        for kind, value in optimizer.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    }


def restore_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Restore the tensors of `named_optimizer_state`. Raises ValueError if they do not fit the model."""
    weights = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        if name not in weights or (value.ndim and value.shape != weights[name].shape):
            raise ValueError(f"the optimizer's {key} {tuple(value.shape)} fits no weight of the model")
        weight = weights[name]
        # a copy: tensors in a file's memory map are aligned differently, which can change the last bit of a sum
        optimizer.state[weight][kind] = value.to(weight.device, copy=True)
