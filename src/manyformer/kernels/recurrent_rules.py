"""Update rules of recurrent memories with gate projections of their own: decayed sums and the gated delta rule."""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyformer.head_selection import HeadProjection
from manyformer.kernels.decay_gates import DecayGate
from manyformer.kernels.memory_rules import MemoryResult, MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.ops import fla_recurrence, linear_attention, matrix_recurrence


@final
class GateProjections(nn.Module):
    """Gates of several kinds side by side, each from its own projection."""

    def __init__(self, **projections: HeadProjection) -> None:
        super().__init__()
        for name, projection in projections.items():
            self.add_module(name, projection)

    def forward(self, x: Float[Tensor, "b l d"]) -> Float[Tensor, "b h l n"]:
        return torch.cat([projection(x) for projection in self.children()], -1)


@final
class DecayRule(MemoryRule):
    """S_t = D_t S_(t-1) + k_t v_t^T, read as S_t^T q_t without a normalizer; D decays each head or channel.

    `gate_projection` makes the gates that `decay` needs; None if it needs none. `value_activation` acts on values.
    """

    forms = frozenset({"quadratic", "chunked", "recurrent", "fla"})

    def __init__(
        self,
        decay: DecayGate,
        gate_projection: HeadProjection | None = None,
        *,
        value_activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.decay = decay
        self.gate_projection = gate_projection
        self.value_activation = value_activation
        self.gate_dim = decay.gate_dim

    @property
    def has_decay_per_head(self) -> bool:
        return self.decay.gate_dim <= 1

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        if self.value_activation is None:
            v = tokens.v
        else:
            v = self.value_activation(tokens.v)
        decay = mask_padding(self.decay(gates_of(tokens)), tokens.valid)
        v = mask_padding(v, tokens.valid)
        return decayed_sum(tokens._replace(v=v), decay, memory, form=form, chunk=chunk)


@final
class GatedDeltaRule(MemoryRule):
    """S_t = D_t S_(t-1) + b_t k_t (v_t - (D_t S_(t-1))^T k_t)^T: the memory decays, then a token corrects its reading.

    Yang et al. 2024 (Gated DeltaNet, arXiv:2412.06464, section 3.1); without `decay` it is DeltaNet (arXiv:2406.06484).
    b is `max_strength` times the sigmoid of the last gate: up to 2 lets the eigenvalue 1 - b of a transition be
    negative (Grazzi et al. 2024, arXiv:2411.12537). Keys must have length 1, else the memory may grow without bound.
    """

    forms = frozenset({"chunked", "recurrent", "fla"})

    def __init__(self, decay: DecayGate | None, gate_projection: GateProjections, *, max_strength: float = 1.0) -> None:
        super().__init__()
        self.decay = decay
        self.gate_projection = gate_projection
        self.max_strength = max_strength
        self.gate_dim = 1 if decay is None else decay.gate_dim + 1

    @property
    def has_decay_per_head(self) -> bool:
        return self.decay is not None and self.decay.gate_dim <= 1

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        gate = gates_of(tokens)
        decay_gate, strength_gate = torch.split(gate, [self.gate_dim - 1, 1], -1)
        decay = None
        if self.decay is not None:
            decay = mask_padding(self.decay(decay_gate), tokens.valid)
        strength = mask_padding(self.max_strength * torch.sigmoid(strength_gate), tokens.valid)[..., 0]
        inputs = tokens.query_features, tokens.key_features, tokens.v, decay, tokens.run, memory.matrix
        if form == "fla":
            y, matrix = fla_recurrence.chunked(*inputs, strength=strength, dtype=tokens.dtype)
        elif form == "chunked":
            y, matrix = matrix_recurrence.chunked(*inputs, strength=strength, chunk=chunk)
        else:
            y, matrix = matrix_recurrence.recurrent(*inputs, strength=strength)
        return MemoryResult(y, RecurrentMemory(matrix))

    def extra_repr(self) -> str:
        return f"max_strength={self.max_strength}"


def decayed_sum(
    tokens: TokenFeatures,
    decay: Float[Tensor, "b h l #r"],
    memory: RecurrentMemory,
    *,
    form: RecurrenceForm,
    chunk: int,
) -> MemoryResult:
    """Outputs of a decayed sum in this form; values of padding must be 0, and their decays too."""
    q = tokens.query_features
    k = tokens.key_features
    v = tokens.v
    if form == "quadratic":
        y, matrix, weights = linear_attention.quadratic(q, k, v, decay, tokens.run)
        return MemoryResult(y, RecurrentMemory(matrix), weights)
    if form == "fla":
        y, matrix = fla_recurrence.chunked(q, k, v, decay, tokens.run, memory.matrix, dtype=tokens.dtype)
    elif form == "chunked":
        y, matrix = linear_attention.chunked(q, k, v, decay, tokens.run, memory.matrix, chunk=chunk)
    else:
        y, matrix = matrix_recurrence.recurrent(q, k, v, decay, tokens.run, memory.matrix)
    return MemoryResult(y, RecurrentMemory(matrix))


def gates_of(tokens: TokenFeatures) -> Float[Tensor, "b h l n"]:
    """The gates of the tokens; no channels where the rule has none."""
    if tokens.gate is None:
        return tokens.v[..., :0]
    return tokens.gate


def mask_padding(x: Float[Tensor, "b h l n"], valid: Tensor | None) -> Float[Tensor, "b h l n"]:
    """Zeros at padding, which must change no memory."""
    if valid is None:
        return x
    return x.masked_fill(~valid[:, None, :, None], 0.0)
