"""Gates that join a branch to the residual stream in place of the sum (Parisotto et al. 2020, section 3.2)."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Literal, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.dropout import Dropout
from manyformer.errors import UserError
from manyformer.residual.residual import AddJoin, ResidualJoin

GateName = Literal["residual", "input", "output", "highway", "sigtanh", "gru"]

DEFAULT_GATE_BIAS = 2.0
"""The initial gate bias with which the paper's gated recurrent unit passes 88% of the stream."""


class GatedJoin(ResidualJoin):
    """A gate g(x, y) of the stream x and a branch y, after dropout of the branch.

    Each use has its own weights, matrices without bias. `bias` is b in the equations, one number for each channel, with
    the initial value `gate_bias`: the larger it is, the closer g(x, y) is to x."""

    def __init__(self, dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.dim = dim
        self.dropout = Dropout(dropout)

    def forward(self, x: Float[Tensor, "b l d"], branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        gate = self.bind_gate(Tensor.t)
        return gate(x.flatten(0, -2), self.dropout(branch).flatten(0, -2)).view_as(x)

    @abstractmethod
    def bind_gate(self, transpose: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """The gate as a function of stream and branch, both (n, d), bound to its current parameters."""

    def _matrix(self) -> nn.Parameter:
        return nn.Parameter(nn.init.xavier_uniform_(torch.empty(self.dim, self.dim)))

    def _gate_bias(self, gate_bias: float) -> nn.Parameter:
        return nn.Parameter(torch.full((self.dim,), gate_bias))


@final
class InputGate(GatedJoin):
    """g(x, y) = sigmoid(W x) * x + y."""

    def __init__(self, dim: int, *, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.weight = self._matrix()

    def bind_gate(self, transpose: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        weight = transpose(self.weight)
        return lambda x, y: _add_product(y, torch.sigmoid(x @ weight), x)


@final
class OutputGate(GatedJoin):
    """g(x, y) = x + sigmoid(W x - b) * y."""

    def __init__(self, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.weight, self.bias = self._matrix(), self._gate_bias(gate_bias)

    def bind_gate(self, transpose: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        weight = transpose(self.weight)
        bias = -self.bias
        return lambda x, y: _add_product(x, torch.sigmoid(torch.addmm(bias, x, weight)), y)


@final
class HighwayGate(GatedJoin):
    """g(x, y) = s * x + (1 - s) * y with s = sigmoid(W x + b) (Srivastava et al. 2015)."""

    def __init__(self, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.weight, self.bias = self._matrix(), self._gate_bias(gate_bias)

    def bind_gate(self, transpose: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        weight = transpose(self.weight)
        bias = self.bias
        return lambda x, y: _interpolate(y, x, torch.sigmoid(torch.addmm(bias, x, weight)))


@final
class SigmoidTanhGate(GatedJoin):
    """g(x, y) = x + sigmoid(W y - b) * tanh(U y); `branch_weight` are the rows of W, then those of U."""

    def __init__(self, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.branch_weight = nn.Parameter(torch.cat([self._matrix().data for _ in range(2)]))
        self.bias = self._gate_bias(gate_bias)

    def bind_gate(self, transpose: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        weight = transpose(self.branch_weight)
        bias = F.pad(-self.bias, (0, self.dim))

        def gate(x: Tensor, y: Tensor) -> Tensor:
            gate_input, candidate = torch.addmm(bias, y, weight).chunk(2, -1)
            return _add_product(x, torch.sigmoid(gate_input), torch.tanh(candidate))

        return gate


@final
class GRUGate(GatedJoin):
    """g(x, y) = (1 - z) * x + z * h, a gated recurrent unit with the stream as its state and the branch as its input.

    r = sigmoid(W_r y + U_r x), z = sigmoid(W_z y + U_z x - b), h = tanh(W_g y + U_g (r * x)). `branch_weight` are the
    rows of W_r, W_z and W_g, `stream_weight` those of U_r and U_z, `candidate_weight` is U_g. `torch.nn.GRUCell` is
    another function: there r acts after U_g, and z is the share of the old state."""

    def __init__(self, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.branch_weight = nn.Parameter(torch.cat([self._matrix().data for _ in range(3)]))
        self.stream_weight = nn.Parameter(torch.cat([self._matrix().data for _ in range(2)]))
        self.candidate_weight, self.bias = self._matrix(), self._gate_bias(gate_bias)

    def bind_gate(self, transpose: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        weights = (self.branch_weight, self.stream_weight, self.candidate_weight)
        branch_weight, stream_weight, candidate_weight = map(transpose, weights)
        # of the three products of the branch, that for the update gate has the bias -b
        dim = self.dim
        bias = F.pad(-self.bias, (self.dim, self.dim))

        def gate(x: Tensor, y: Tensor) -> Tensor:
            gate_inputs, candidate = torch.addmm(bias, y, branch_weight).split_with_sizes([2 * dim, dim], -1)
            reset, update = torch.sigmoid(torch.addmm(gate_inputs, x, stream_weight)).chunk(2, -1)
            return _interpolate(x, torch.tanh(torch.addmm(candidate, reset * x, candidate_weight)), update)

        return gate


def _add_product(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """x + first * second, in one operation unless autocast has given them different dtypes."""
    is_mixed = not x.dtype == first.dtype == second.dtype
    if is_mixed:
        return x + first * second
    return torch.addcmul(x, first, second)


def _interpolate(x: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """(1 - share) * x + share * y, in one operation unless autocast has given them different dtypes."""
    if not x.dtype == y.dtype == share.dtype:
        return x + share * (y - x)
    return torch.lerp(x, y, share)


_GATES: dict[str, Callable[..., GatedJoin]] = {
    "output": OutputGate,
    "highway": HighwayGate,
    "sigtanh": SigmoidTanhGate,
    "gru": GRUGate,
}


def make_join(
    gate: GateName, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0
) -> ResidualJoin | None:
    """A new join of this kind: a gate, or the sum, which is None without dropout. Raises UserError."""
    if gate == "residual":
        if dropout:
            return AddJoin(dropout=dropout)
        return None
    if gate == "input":
        return InputGate(dim, dropout=dropout)
    if gate not in _GATES:
        raise UserError(f"gate ('{gate}') must be one of {', '.join(get_args(GateName))}")
    return _GATES[gate](dim, gate_bias=gate_bias, dropout=dropout)
