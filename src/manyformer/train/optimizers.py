"""The optimiser of a run: fused Adam and AdamW, and which weights decay."""

from typing import Any

import torch
from torch import Tensor, nn

from manyformer.config import AdamWConfig, OptimConfig
from manyformer.position import Position
from manyformer.training_hooks import OwnOptimizerEpsilon


def make_optimiser(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """AdamW or Adam over all weights that learn, in torch's fused form: on a CPU five times faster than its default.

    Its learning rate is set before every step. Weight decay is for matrices alone: biases, norms and tables that are
    looked up (embeddings, an output tied to one, positions) do not decay.
    """
    options: dict[str, Any] = {"lr": 0.0, "betas": config.betas, "eps": config.eps, "fused": True}
    sizes = own_epsilon_groups(model)
    own = {id(weight) for weights in sizes.values() for weight in weights}
    gradual: list[dict[str, Any]] = [{"params": weights, "eps": size} for size, weights in sizes.items()]
    if not isinstance(config, AdamWConfig):
        rest = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in own]
        return torch.optim.Adam([{"params": rest}, *gradual], **options)
    decays, stays = ([weight for weight in part if id(weight) not in own] for part in weight_decay_groups(model))
    groups: list[dict[str, Any]] = [
        {"params": decays, "weight_decay": config.weight_decay},
        {"params": stays},
        *gradual,
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], weight_decay=0.0, **options)


def own_epsilon_groups(model: nn.Module) -> dict[float, list[nn.Parameter]]:
    """The weights that follow their gradient as it is, by the size that makes them (see `OwnOptimizerEpsilon`)."""
    found: dict[float, list[nn.Parameter]] = {}
    known: set[int] = set()
    for part in model.modules():
        if isinstance(part, OwnOptimizerEpsilon):
            mine = [w for w in part.parameters(recurse=False) if w.requires_grad and id(w) not in known]
            found.setdefault(part.optimizer_eps, []).extend(mine)
            known.update(map(id, mine))
    return {size: weights for size, weights in found.items() if weights}


def weight_decay_groups(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights that decay, and those that do not."""
    tables = {
        id(weight)
        for module in model.modules()
        if isinstance(module, nn.Embedding | Position)
        for weight in module.parameters()
    }
    decays: list[nn.Parameter] = []
    stays: list[nn.Parameter] = []
    for weight in model.parameters():
        if weight.requires_grad:
            (decays if weight.ndim >= 2 and id(weight) not in tables else stays).append(weight)
    return decays, stays


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Let the next step use this learning rate."""
    for group in optimiser.param_groups:
        group["lr"] = rate


def named_state(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimiser's tensors under `NAME/KIND`, such as `body.0.ff.down.weight/exp_avg`."""
    return {
        f"{name}/{kind}": value
        for name, weight in model.named_parameters()
        for kind, value in optimiser.state.get(weight, {}).items()
        if isinstance(value, Tensor)
    }


def restore_state(model: nn.Module, optimiser: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put back what `named_state` gave; raises ValueError where it does not fit the model."""
    weights = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, kind = key.rpartition("/")
        if name not in weights or (value.ndim and value.shape != weights[name].shape):
            raise ValueError(f"the optimiser's {key} {tuple(value.shape)} fits no weight of the model")
        weight = weights[name]
        # a copy: tensors that lie in a file's memory are aligned differently, which can change the last bit of a sum
        optimiser.state[weight][kind] = value.to(weight.device, copy=True)
