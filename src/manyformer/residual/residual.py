"""Residual branches, and the joins that combine a branch with the residual stream."""

from abc import ABC, abstractmethod
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.core import Context, Layer, LayerOutput, State
from manyformer.dropout import Dropout


class ResidualJoin(nn.Module, ABC):
    """Combines the output of a branch with the residual stream."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "b l d"], branch: Float[Tensor, "b l d"]) -> Float[Tensor, "b l d"]: ...


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
        branch, state, loss = self.inner(x if self.pre_norm is None else self.pre_norm(x), ctx, state)
        if self.inner_norm is not None:
            branch = self.inner_norm(branch)
        if self.join is None:
            y = x + branch
        else:
            y = self.join(x, branch)
        return LayerOutput(y if self.post_norm is None else self.post_norm(y), state, loss)

    @property
    def only_adds(self) -> bool:
        """Whether the output is the sum of the stream and `summand`, so that the stream follows from the output."""
        return self.post_norm is None and isinstance(self.join, AddJoin | None)

    def summand(self, x: Float[Tensor, "b l d"], ctx: Context, state: State = None) -> LayerOutput:
        """What a branch that only adds adds to the stream."""
        branch, state, loss = self.inner(x if self.pre_norm is None else self.pre_norm(x), ctx, state)
        if self.inner_norm is not None:
            branch = self.inner_norm(branch)
        return LayerOutput(self.join.summand(branch) if isinstance(self.join, AddJoin) else branch, state, loss)

    def extend_state(self, x: Float[Tensor, "b l d"], ctx: Context, state: State) -> State:
        return self.inner.extend_state(x if self.pre_norm is None else self.pre_norm(x), ctx, state)
