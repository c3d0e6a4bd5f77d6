"""Decays of recurrent memories: constants of heads, or functions of gates that a layer projects from its input."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.runtime.device_reads import ConstantTensor
from manyformer.nn.runtime.devices import wide_dtype
from manyformer.nn.runtime.head_selection import HeadSelection, PerHeadTensors, head_channels, select_entries


class DecayGate(PerHeadTensors, ABC):
    """The logarithms of decays, at most 0, from `gate_dim` gate channels of each token and head.

    There is one decay per head, or one per feature channel."""

    gate_dim: int

    @abstractmethod
    def forward(self, gate: Float[Tensor, "b h l n"]) -> Float[Tensor, "b h l r"]: ...

    if TYPE_CHECKING:

        def __call__(self, gate: Tensor) -> Tensor: ...


@final
class FixedDecay(DecayGate):
    """A constant decay of each head, given by its logarithm, in float64 for a model of any precision."""

    gate_dim = 0

    def __init__(self, log_decay: Sequence[float]) -> None:
        super().__init__()
        # numbers, so that no change of the model's dtype makes decays less exact
        self.log_decay = ConstantTensor(tuple(log_decay), torch.float64)
        # for devices that have no float64
        self.rounded = ConstantTensor(tuple(log_decay), torch.float32)

    def forward(self, gate: Float[Tensor, "b h l n"]) -> Float[Tensor, "b h l r"]:
        is_exact = wide_dtype(gate.device) == torch.float64
        log_decay = (self.log_decay if is_exact else self.rounded).on(gate.device)
        return log_decay.to(gate.dtype)[:, None, None].expand(*gate.shape[:3], 1)

    @property
    def differs_by_head(self) -> bool:
        return len(self.log_decay.values) > 1

    def keep_heads(self, selection: HeadSelection) -> None:
        decays = self.log_decay.values
        remaining = tuple(decays[head] for head in selection.entries(len(decays)))
        self.log_decay = ConstantTensor(remaining, torch.float64)
        self.rounded = ConstantTensor(remaining, torch.float32)


@final
class SoftplusDecay(DecayGate):
    """-exp(a) softplus(gate + bias): a rate exp(a) of each head times a step of each head, or of each of its channels.

    Gu and Dao 2023 (arXiv:2312.00752, section 3.6): rates begin uniform in [1, 16], steps log-uniform in [0.001, 0.1].
    With `width` channels there is one decay for each, as in Kimi Delta Attention (arXiv:2510.26692)."""

    def __init__(self, heads: int, width: int = 1) -> None:
        super().__init__()
        self.gate_dim = width
        self.a_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads * width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rates and steps."""
        nn.init.uniform_(self.a_log, 1.0, 16.0)
        with torch.no_grad():
            self.a_log.log_()
        draw_step_biases(self.dt_bias)

    def steps(self, gate: Float[Tensor, "b h l n"]) -> Float[Tensor, "b h l n"]:
        """softplus(gate + bias), by which the rates are multiplied."""
        return F.softplus(gate + self.dt_bias.view(len(self.a_log), 1, -1))

    def forward(self, gate: Float[Tensor, "b h l n"]) -> Float[Tensor, "b h l r"]:
        return -self.a_log.exp()[:, None, None] * self.steps(gate)

    @property
    def differs_by_head(self) -> bool:
        return True

    def keep_heads(self, selection: HeadSelection) -> None:
        select_entries(self, "a_log", selection.heads, 0)
        select_entries(self, "dt_bias", head_channels(selection.heads, self.gate_dim), 0)


@final
class SigmoidDecay(DecayGate):
    """sigmoid(gate)^(1 / `root`) for each of `width` channels (Yang et al. 2024, arXiv:2312.06635, section 4.4).

    The root, 16 in the paper, makes decays begin near 1: the logarithm is divided, not the gate."""

    def __init__(self, width: int, *, root: float = 16.0) -> None:
        super().__init__()
        self.gate_dim = width
        self.root = root

    def forward(self, gate: Float[Tensor, "b h l n"]) -> Float[Tensor, "b h l r"]:
        # log(sigmoid^(1/root)), without the exponential in between
        return F.logsigmoid(gate) / self.root

    @property
    def differs_by_head(self) -> bool:
        return False

    def extra_repr(self) -> str:
        return f"root={self.root}"


def draw_step_biases(bias: Float[Tensor, " n"]) -> None:
    """Fill `bias` such that softplus(bias) is log-uniform in [0.001, 0.1] (Gu and Dao 2023, section 3.6)."""
    steps = torch.empty_like(bias).uniform_(-6.907755, -2.302585).exp().clamp(min=1e-4)
    with torch.no_grad():
        # the inverse of softplus
        bias.copy_(steps + (-torch.expm1(-steps)).log())
