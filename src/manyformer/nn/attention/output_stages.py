"""What happens to the outputs of heads before the output projection: norms, and gates from the layer's input."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.runtime.head_selection import (
    HeadProjection,
    HeadSelection,
    PerHeadTensors,
    head_channels,
    select_entries,
)
from manyformer.nn.runtime.length_norms import rms_norm


class OutputStage(nn.Module, ABC):
    """Maps the outputs of all heads to those that the output projection reads.

    `couples_heads` says that the outputs of one head depend on those of others, so that no head can be removed."""

    couples_heads: bool = False

    @abstractmethod
    def forward(self, y: Float[Tensor, "b h l f"], x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l f"]:
        """The outputs of heads after this stage; `x` is what the layer projects its queries from."""

    if TYPE_CHECKING:

        def __call__(self, y: Tensor, x: Tensor) -> Tensor: ...


@final
class SharedHeadNorm(nn.Module):
    """The root mean square norm of each head's outputs, whose weight all heads share; `learned=False` has none."""

    def __init__(self, value_dim: int, *, learned: bool = True, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(value_dim)) if learned else None
        self.value_dim = value_dim
        self.eps = eps

    def forward(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b h l f"]:
        return rms_norm(y, None if self.weight is None else self.weight.to(y.dtype), eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.value_dim}, eps={self.eps}"


@final
class HeadGroupNorm(PerHeadTensors):
    """A norm over the outputs of each of `groups` groups of adjacent heads, with weights for all channels of all heads.

    With `centred` it is a LayerNorm, else it divides by the root mean square. Raises ValueError for groups of different
    sizes."""

    def __init__(
        self, heads: int, value_dim: int, groups: int, *, centred: bool = False, bias: bool = False, eps: float = 1e-5
    ) -> None:
        super().__init__()
        if groups < 1 or heads % groups:
            raise ValueError(f"heads ({heads}) must be a multiple of the groups of the output norm ({groups})")
        self.heads = heads
        self.value_dim = value_dim
        self.groups = groups
        self.centred = centred
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads * value_dim))
        self.bias = nn.Parameter(torch.zeros(heads * value_dim)) if bias else None

    def forward(self, y: Float[Tensor, "b h l f"]) -> Float[Tensor, "b h l f"]:
        # channels of adjacent heads must be adjacent to be normalized together
        by_token = y.transpose(1, 2)
        grouped = by_token.unflatten(2, (self.groups, -1)).flatten(3)  # type: ignore[no-untyped-call]
        if self.centred:
            normalized = F.layer_norm(grouped, grouped.shape[-1:], eps=self.eps)
        else:
            normalized = rms_norm(grouped, eps=self.eps)
        scaled = normalized.flatten(2) * self.weight.to(y.dtype)
        biased = scaled if self.bias is None else scaled + self.bias.to(y.dtype)
        return biased.view(by_token.shape).transpose(1, 2)

    @property
    def differs_by_head(self) -> bool:
        return True

    def keep_heads(self, selection: HeadSelection) -> None:
        for name in ("weight", "bias"):
            if getattr(self, name) is not None:
                select_entries(self, name, head_channels(selection.heads, self.value_dim), 0)
        # heads can be removed only where every head is a group, which `couples_heads` tells
        self.heads = self.groups = len(selection.heads)

    def extra_repr(self) -> str:
        return f"{self.heads} heads in {self.groups} groups"


@final
class GatedNormStage(OutputStage):
    """norm(y) * activation(gate(x)), either of which may be missing; norm(y * activation(gate(x))) with `gate_first`.

    The order matters: Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) normalizes before the gate, Mamba-2 (Dao and
    Gu 2024, arXiv:2405.21060, section 7) after it."""

    def __init__(
        self,
        norm: SharedHeadNorm | HeadGroupNorm | None = None,
        gate: HeadProjection | None = None,
        activation: Callable[[Tensor], Tensor] = F.silu,
        *,
        gate_first: bool = False,
    ) -> None:
        super().__init__()
        self.norm = norm
        self.gate = gate
        self.activation = activation
        self.gate_first = gate_first
        self.couples_heads = isinstance(norm, HeadGroupNorm) and norm.groups != norm.heads

    def forward(self, y: Float[Tensor, "b h l f"], x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l f"]:
        return self.combine(y, None if self.gate is None else self.gate(x))

    def combine(
        self, y: Float[Tensor, "b h l f"], gate_values: Float[Tensor, "b h l f"] | None
    ) -> Float[Tensor, "b h l f"]:
        """`forward` after the projection of the gate."""
        factor = None
        if gate_values is not None:
            factor = self.activation(gate_values)
        if factor is not None and self.gate_first:
            y = y * factor
        if self.norm is not None:
            y = self.norm(y)
        if factor is None or self.gate_first:
            return y
        return y * factor
