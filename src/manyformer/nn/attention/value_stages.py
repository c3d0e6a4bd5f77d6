"""What is added to the projected values of attention: vectors of the tokens, and the values of the lowest layer."""

from abc import abstractmethod
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.nn.core import TokenPositions
from manyformer.nn.runtime.head_selection import (
    HeadSelection,
    PerHeadTensors,
    head_channels,
    select_entries,
    select_outputs,
)
from manyformer.nn.runtime.training_hooks import OptimizerHints


class ValueStage(PerHeadTensors):
    """Maps the values of all key heads to those that are cached.

    `couples_layers` says that it reads the values of the same heads in another layer, `reads_first_values` that these
    are the ones of the lowest layer, which a `StreamStack` hands on."""

    couples_layers: bool = False
    reads_first_values: bool = False

    @abstractmethod
    def forward(
        self, v: Float[Tensor, "b g l f"], x: Float[Tensor, "b l d"], positions: TokenPositions
    ) -> Float[Tensor, "b g l f"]:
        """The values; `x` is what they were projected of."""

    if TYPE_CHECKING:

        def __call__(self, v: Tensor, x: Tensor, positions: TokenPositions) -> Tensor: ...


GATE_CHANNELS = 12
"""The channels of the stream that a gate of values reads; models of public speedruns have as many."""

GATE_SCALE = 3.0
"""The largest value of a gate, which is half of it while its matrix is near 0."""


@final
class ValueEmbedding(ValueStage, OptimizerHints):
    """v + 3 sigmoid(W x[:12]) E[token], with one gate for each key head (after Zhou et al. 2024, arXiv:2410.17897).

    Each layer has a table E of its own, as wide as its values, drawn evenly with the deviation 1 / sqrt(dim)."""

    reads_token_ids = True
    # a gate of each head, no matrix between activations
    adamw_weights = ("gate.weight",)

    def __init__(self, vocab: int, dim: int, kv_heads: int, value_dim: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        self.value_dim = value_dim
        self.table = nn.Embedding(vocab, kv_heads * value_dim)
        self.gate_channels = min(dim, GATE_CHANNELS)
        self.gate = nn.Linear(self.gate_channels, kv_heads, bias=False)
        limit = (3 / dim) ** 0.5
        nn.init.uniform_(self.table.weight, -limit, limit)
        nn.init.uniform_(self.gate.weight, 0.0, 0.02)

    def forward(
        self, v: Float[Tensor, "b g l f"], x: Float[Tensor, "b l d"], positions: TokenPositions
    ) -> Float[Tensor, "b g l f"]:
        if positions.token_ids is None:
            raise ValueError(
                "ValueEmbedding looks tokens up, and was given none: it must be in the stack of a model that generates"
            )
        vectors = self.table(positions.token_ids).unflatten(2, (self.kv_heads, self.value_dim))
        gates = GATE_SCALE * torch.sigmoid(self.gate(x[..., : self.gate_channels]))
        # the table is wider than values under autocast
        added: Tensor = (gates[..., None] * vectors).transpose(1, 2).to(v.dtype)
        return v + added

    @property
    def differs_by_head(self) -> bool:
        return True

    def keep_heads(self, selection: HeadSelection) -> None:
        key_heads = selection.kv_heads
        select_entries(self.table, "weight", head_channels(key_heads, self.value_dim), 1)
        select_outputs(self.gate, key_heads)
        self.kv_heads = len(key_heads)
        self.table.embedding_dim = len(key_heads) * self.value_dim

    def extra_repr(self) -> str:
        return f"{self.kv_heads} heads"


@final
class ValueResidual(ValueStage):
    """share v + (1 - share) v_0 with the values v_0 of the lowest layer (Zhou et al. 2024, arXiv:2410.17897).

    The share is learned, 0.5 at first. The lowest layer itself (`is_first`) has none, and leaves its values as they are
    projected."""

    couples_layers = True
    reads_first_values = True
    undecayed = ("share",)

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.share = None if is_first else nn.Parameter(torch.tensor([0.5]))

    def forward(
        self, v: Float[Tensor, "b g l f"], x: Float[Tensor, "b l d"], positions: TokenPositions
    ) -> Float[Tensor, "b g l f"]:
        first = positions.first_values
        if first is None:
            raise ValueError("ValueResidual mixes the values of several layers: these must be in one StreamStack")
        if self.share is None:
            first.values = v
            return v
        assert first.values is not None
        return first.values + self.share.to(v.dtype) * (v - first.values)

    @property
    def differs_by_head(self) -> bool:
        return False
