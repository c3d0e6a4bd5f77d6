"""Residual branches, and the joins that combine a branch with the stream: the sum, and gates in its place."""

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, final, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.base.errors import UserError
from manyformer.nn.core import Context, Layer, LayerOutput, State
from manyformer.nn.runtime.dropout import Dropout
from manyformer.nn.runtime.torch_internals import has_hooks
from manyformer.nn.runtime.training_hooks import FusedRows

Transpose = Callable[[Tensor], Tensor]
"""Transposes a weight, into whatever layout suits the products that will read it."""

BoundJoin = Callable[[Tensor, Tensor], Tensor]
"""A join as a function of the stream and the branch (b, l, d)."""

__all__ = [
    "AddJoin",
    "GRUGate",
    "GatedJoin",
    "HighwayGate",
    "InputGate",
    "OutputGate",
    "Residual",
    "ResidualJoin",
    "SigmoidTanhGate",
]


class ResidualJoin(nn.Module, ABC):
    """Combines the output of a branch with the residual stream."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]: ...

    def bind(self, transpose: Transpose) -> BoundJoin:
        """The join in evaluation mode with its current parameters; by default the module, which is always right."""
        return self


@final
class AddJoin(ResidualJoin):
    """The sum (He et al. 2016), after dropout of the branch (Vaswani et al. 2017, section 5.4).

    The branch is multiplied by `scale`: 0.5 for the half steps of the Conformer (Gulati et al. 2020, equation 1)."""

    def __init__(self, *, dropout: float, scale: float = 1.0) -> None:
        super().__init__()
        self.dropout = Dropout(dropout)
        self.scale = scale

    def forward(self, x: Float[Tensor, "b l d"], branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        return x + self.summand(branch)

    def summand(self, branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]:
        """What is added to the stream."""
        dropped: Tensor = self.dropout(branch)
        if self.scale == 1.0:
            return dropped
        return dropped * self.scale

    def bind(self, transpose: Transpose) -> BoundJoin:
        if not _is_identity(self.dropout):
            return self
        if self.scale == 1.0:
            return operator.add
        return self.forward


@final
class Residual(Layer):
    """A residual branch around `inner`: y = post_norm(join(x, inner_norm(inner(pre_norm(x))))).

    Post-norm (Vaswani et al. 2017) sets `post_norm`, pre-norm (Xiong et al. 2020) `pre_norm`, sandwich norm (Ding et
    al. 2021, section 2.4) `pre_norm` and `inner_norm`. None is the identity, or the plain sum for `join`."""

    def __init__(
        self,
        inner: Layer,
        *,
        pre_norm: nn.Module | None = None,
        inner_norm: nn.Module | None = None,
        post_norm: nn.Module | None = None,
        join: ResidualJoin | None = None,
    ) -> None:
        super().__init__()
        self.inner = inner
        self.pre_norm = pre_norm
        self.inner_norm = inner_norm
        self.post_norm = post_norm
        self.join = join
        self.keeps_tokens = inner.keeps_tokens

    def init_state(self, batch: int, *, capacity: int | None = None, device: torch.device, dtype: torch.dtype) -> State:
        return self.inner.init_state(batch, capacity=capacity, device=device, dtype=dtype)

    def forward(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        branch, next_state, loss = self._branch(x, ctx, state)
        if self.join is None:
            y = x + branch
        else:
            y = self.join(x, branch)
        return LayerOutput(y if self.post_norm is None else self.post_norm(y), next_state, loss)

    @property
    def only_adds(self) -> bool:
        """Whether the output is the sum of the stream and `summand`, so that the stream follows from the output."""
        return self.post_norm is None and isinstance(self.join, AddJoin | None)

    def summand(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        """What a branch that only adds adds to the stream."""
        branch, next_state, loss = self._branch(x, ctx, state)
        return LayerOutput(self.join.summand(branch) if isinstance(self.join, AddJoin) else branch, next_state, loss)

    def _branch(self, x: Float[Tensor, "b l d"], ctx: Context, state: State) -> LayerOutput:
        """The output of the branch as the join gets it, before dropout and scale."""
        y, next_state, loss = self.inner(x if self.pre_norm is None else self.pre_norm(x), ctx, state)
        return LayerOutput(y if self.inner_norm is None else self.inner_norm(y), next_state, loss)

    def extend_state(self, x: Float[Tensor, "b l d"], ctx: Context, state: State) -> State:
        return self.inner.extend_state(x if self.pre_norm is None else self.pre_norm(x), ctx, state)


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

    def bind(self, transpose: Transpose) -> BoundJoin:
        if not _is_identity(self.dropout):
            return self
        gate = self.bind_gate(transpose)
        return lambda x, branch: gate(x.flatten(0, -2), branch.flatten(0, -2)).view(x.shape)

    @abstractmethod
    def bind_gate(self, transpose: Transpose) -> Callable[[Tensor, Tensor], Tensor]:
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

    def bind_gate(self, transpose: Transpose) -> Callable[[Tensor, Tensor], Tensor]:
        weight = transpose(self.weight)
        return lambda x, y: _add_product(y, torch.sigmoid(x @ weight), x)


@final
class OutputGate(GatedJoin):
    """g(x, y) = x + sigmoid(W x - b) * y."""

    def __init__(self, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.weight = self._matrix()
        self.bias = self._gate_bias(gate_bias)

    def bind_gate(self, transpose: Transpose) -> Callable[[Tensor, Tensor], Tensor]:
        weight = transpose(self.weight)
        bias = -self.bias
        return lambda x, y: _add_product(x, torch.sigmoid(torch.addmm(bias, x, weight)), y)


@final
class HighwayGate(GatedJoin):
    """g(x, y) = s * x + (1 - s) * y with s = sigmoid(W x + b) (Srivastava et al. 2015)."""

    def __init__(self, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.weight = self._matrix()
        self.bias = self._gate_bias(gate_bias)

    def bind_gate(self, transpose: Transpose) -> Callable[[Tensor, Tensor], Tensor]:
        weight = transpose(self.weight)
        bias = self.bias
        return lambda x, y: _interpolate(y, x, torch.sigmoid(torch.addmm(bias, x, weight)))


@final
class SigmoidTanhGate(GatedJoin, FusedRows):
    """g(x, y) = x + sigmoid(W y - b) * tanh(U y); `branch_weight` are the rows of W, then those of U."""

    def __init__(self, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.branch_weight = nn.Parameter(torch.cat([self._matrix().data for _ in range(2)]))
        self.bias = self._gate_bias(gate_bias)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"branch_weight": (self.dim,) * 2}

    def bind_gate(self, transpose: Transpose) -> Callable[[Tensor, Tensor], Tensor]:
        weight = transpose(self.branch_weight)
        # the bias belongs to the gate alone, the candidate's half of the product has none
        bias = F.pad(-self.bias, (0, self.dim))

        def gate(x: Tensor, y: Tensor) -> Tensor:
            gate_input, candidate = torch.addmm(bias, y, weight).chunk(2, -1)
            return _add_product(x, torch.sigmoid(gate_input), torch.tanh(candidate))

        return gate


@final
class GRUGate(GatedJoin, FusedRows):
    """g(x, y) = (1 - z) * x + z * h, a gated recurrent unit with the stream as its state and the branch as its input.

    r = sigmoid(W_r y + U_r x), z = sigmoid(W_z y + U_z x - b), h = tanh(W_g y + U_g (r * x)). `branch_weight` are the
    rows of W_r, W_z and W_g, `stream_weight` those of U_r and U_z, `candidate_weight` is U_g. `torch.nn.GRUCell` is
    another function: there r acts after U_g, and z is the share of the old state."""

    def __init__(self, dim: int, *, gate_bias: float = DEFAULT_GATE_BIAS, dropout: float = 0.0) -> None:
        super().__init__(dim, dropout=dropout)
        self.branch_weight = nn.Parameter(torch.cat([self._matrix().data for _ in range(3)]))
        self.stream_weight = nn.Parameter(torch.cat([self._matrix().data for _ in range(2)]))
        self.candidate_weight = self._matrix()
        self.bias = self._gate_bias(gate_bias)

    def row_parts(self) -> dict[str, tuple[int, ...]]:
        return {"branch_weight": (self.dim,) * 3, "stream_weight": (self.dim,) * 2}

    def bind_gate(self, transpose: Transpose) -> Callable[[Tensor, Tensor], Tensor]:
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


def _is_identity(dropout: Dropout) -> bool:
    """Whether a call of it can be left out: in evaluation mode, and where no hook waits for it."""
    return not dropout.training and not has_hooks(dropout)


def _add_product(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """x + first * second, in one operation unless autocast has given them different dtypes."""
    is_mixed = not x.dtype == first.dtype == second.dtype
    if is_mixed:
        return x + first * second
    return torch.addcmul(x, first, second)


def _interpolate(x: Tensor, y: Tensor, share: Tensor) -> Tensor:
    """(1 - share) * x + share * y, in one operation unless autocast has given them different dtypes."""
    if not x.dtype == y.dtype == share.dtype:
        # under autocast products are narrower than the stream, which fused operators refuse
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
        # the plain sum needs no module
        if dropout:
            return AddJoin(dropout=dropout)
        return None
    if gate == "input":
        return InputGate(dim, dropout=dropout)
    if gate not in _GATES:
        raise UserError(f"gate ('{gate}') must be one of {', '.join(get_args(GateName))}")
    return _GATES[gate](dim, gate_bias=gate_bias, dropout=dropout)
