"""Muon: momentum whose matrices are orthogonalized before each step, for the matrices of hidden layers.

Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/), with the scale of Moonlight (Liu et al. 2025,
arXiv:2502.16982) and the rows of NorMuon (Li et al. 2025, arXiv:2510.05491) by keyword. Which weights are such matrices
is decided in `parameter_rules`."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from manyformer.models.model_files import local_tensor
from manyformer.nn.runtime.devices import device_kind

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of one step of the iteration, which maps a singular value s to a s + b s^3 + c s^5."""

NORM_EPS = 1e-7
"""The least norm that an update is divided by."""

MAX_STACKED = 1 << 24
"""The most numbers of updates that are orthogonalized at once: whole matrices, also where weights are sharded."""

MomentumScale = Literal["original", "match_rms_adamw"]


def iteration_dtype(device: torch.device) -> torch.dtype:
    """The dtype of the iteration on a device: bfloat16, and float32 on a CPU, where it takes half to all of the time.

    Measured on a Xeon with bfloat16 instructions: 0.66 against 1.44 ms for eight matrices of 64 x 64, 613 against 1027
    ms for two of 768 x 3072."""
    if device_kind(device).is_host:
        return torch.float32
    return torch.bfloat16


def orthogonalize(update: Tensor, *, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move the singular values of matrices (..., rows, columns) towards 1 by Newton-Schulz steps, in `dtype`.

    They end between 0.7 and 1.2, except for those that are nearly 0 beside the largest: the coefficients are chosen for
    speed, not for convergence. A matrix of zeros stays one."""
    a, b, c = COEFFICIENTS
    shape = update.shape
    x = update.reshape(-1, *shape[-2:]).to(dtype)
    # the products are of the shorter side
    is_tall = shape[-2] > shape[-1]
    if is_tall:
        x = x.mT
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=NORM_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    if is_tall:
        x = x.mT
    return x.reshape(shape)


def step_scale(rows: int, columns: int, scale: MomentumScale) -> float:
    """The factor on the step of an orthogonalized matrix: Jordan's, or Moonlight's, whose root mean square is 0.2."""
    if scale == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))


def closure_loss(closure: Callable[[], float] | None) -> float | None:
    """The loss that the closure of an optimizer's step computes, with gradients, where there is one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


@final
class Muon(torch.optim.Optimizer):
    """Muon for matrices (rows, columns), and for stacks of them such as those of experts (experts, rows, columns).

    It computes what `torch.optim.Muon` computes, which a test says, and has what that one lacks: matrices of equal
    shape are orthogonalized together; stacks of matrices are allowed; `row_parts` divides fused matrices, such as keys
    and values in one, into those that are orthogonalized each by itself; of a sharded weight the whole update is
    gathered once, instead of in every product of the iteration, and each process keeps its rows; without Nesterov the
    momentum is not overwritten, as torch's is for weights in bfloat16; the iteration runs in `ns_dtype`.

    `row_beta` is NorMuon: rows are divided by the root of the running mean of their mean squares, and the matrix gets
    its norm back. With `cautious` only numbers decay that the step moves towards 0 as well (Chen et al. 2025,
    arXiv:2510.12402)."""

    def __init__(
        self,
        params: Sequence[nn.Parameter] | Sequence[dict[str, Any]],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: torch.dtype | None = None,
        scale: MomentumScale = "original",
        weight_decay: float = 0.1,
        row_beta: float | None = None,
        cautious: bool = False,
        row_parts: Mapping[nn.Parameter, tuple[int, ...]] | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "scale": scale,
            "weight_decay": weight_decay,
            "row_beta": row_beta,
            "cautious": cautious,
        }
        super().__init__(params, defaults)
        self.row_parts = dict(row_parts or {})
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.ndim not in (2, 3):
                    raise ValueError(f"Muon is for matrices and stacks of them, not for a weight {tuple(weight.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step; `closure` computes the loss and its gradients anew."""
        loss = closure_loss(closure)
        for group in self.param_groups:
            for weights, parts in self._stacks(group["params"]):
                self._step_stack(weights, parts, group)
        return loss

    def _stacks(self, weights: Sequence[nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], tuple[int, ...]]]:
        """Weights of equal shape and parts with a gradient, as many together as `MAX_STACKED` allows."""
        by_shape: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for weight in weights:
            if weight.grad is not None:
                parts = self.row_parts.get(weight, (weight.shape[-2],))
                by_shape.setdefault((parts, weight.shape, weight.device, weight.dtype), []).append(weight)
        for (parts, shape, *_), members in by_shape.items():
            count = max(1, MAX_STACKED // max(1, shape.numel()))
            for first in range(0, len(members), count):
                yield members[first : first + count], parts

    def _step_stack(self, weights: list[nn.Parameter], parts: tuple[int, ...], group: dict[str, Any]) -> None:
        updates = torch.stack([_whole(self._momentum(weight, group), weight) for weight in weights])
        moments = None
        if group["row_beta"] is not None:
            moments = torch.stack([self._row_moments(weight) for weight in weights])
        steps = []
        first_row = 0
        for rows in parts:
            part = slice(first_row, first_row + rows)
            first_row += rows
            update = updates[..., part, :]
            dtype = group["ns_dtype"] or iteration_dtype(update.device)
            x = orthogonalize(update, steps=group["ns_steps"], dtype=dtype).to(update.dtype)
            if moments is not None:
                x = _equalize_rows(x, moments[..., part, :], group["row_beta"])
            steps.append(x * step_scale(rows, x.shape[-1], group["scale"]))
        for number, (weight, step) in enumerate(zip(weights, torch.cat(steps, dim=-2), strict=True)):
            if moments is not None:
                self.state[weight]["row_moments"].copy_(moments[number])
            _apply(weight, step, group)

    def _momentum(self, weight: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """This process's part of the update before it is orthogonalized; the momentum is a running mean."""
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        assert weight.grad is not None
        gradient = local_tensor(weight.grad)
        buffer = local_tensor(state["momentum_buffer"])
        buffer.lerp_(gradient, 1 - group["momentum"])
        if group["nesterov"]:
            return gradient.lerp(buffer, group["momentum"])
        return buffer

    def _row_moments(self, weight: nn.Parameter) -> Tensor:
        """The running mean of the mean square of each row, whole in every process."""
        state = self.state[weight]
        if "row_moments" not in state:
            local = local_tensor(weight)
            state["row_moments"] = local.new_zeros(*weight.shape[:-1], 1)
        moments: Tensor = state["row_moments"]
        return moments


def _equalize_rows(x: Tensor, moments: Tensor, beta: float) -> Tensor:
    """NorMuon's division of rows by the root of `moments`, which are updated in place; the matrix keeps its norm."""
    moments.lerp_(x.square().mean(-1, keepdim=True), 1 - beta)
    tiny = torch.finfo(x.dtype).tiny
    equalized = x * moments.clamp(min=tiny).rsqrt()
    new_norm = torch.linalg.matrix_norm(equalized, keepdim=True).clamp(min=tiny)
    rows: Tensor = equalized * (torch.linalg.matrix_norm(x, keepdim=True) / new_norm)
    return rows


def _apply(weight: nn.Parameter, step: Tensor, group: dict[str, Any]) -> None:
    """Decay the weight, or this process's shard of it, and subtract the step."""
    local = local_tensor(weight.detach())
    step = _own_shard(step, weight)
    decay = group["lr"] * group["weight_decay"]
    if group["cautious"]:
        local.mul_(1 - decay * (step * local >= 0))
    else:
        local.mul_(1 - decay)
    local.add_(step, alpha=-group["lr"])


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "device_mesh")


def _whole(local: Tensor, weight: Tensor) -> Tensor:
    """The tensor of which `local` is the part that belongs to this process's shard of `weight`."""
    if not _is_sharded(weight):
        return local
    # loaded with the processes that need it
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    sharded = DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
    full: Tensor = sharded.full_tensor()
    return full


def _own_shard(full: Tensor, weight: Tensor) -> Tensor:
    """The part of a tensor that belongs to this process's shard of `weight`."""
    if not _is_sharded(weight):
        return full
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(weight, DTensor)
    (placement,) = weight.placements
    assert isinstance(placement, Shard)
    # as torch divides an axis, which leaves the last processes less, or nothing
    shards = full.chunk(weight.device_mesh.size(), dim=placement.dim)
    rank = weight.device_mesh.get_local_rank()
    if rank < len(shards):
        return shards[rank]
    return full.narrow(placement.dim, 0, 0)
