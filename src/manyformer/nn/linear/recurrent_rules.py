"""Update rules of recurrent memories with gate projections of their own: how a memory decays, and what it takes up.

Decayed sums (Mamba-2's state space, HGRN2's tied decays), the gated delta rule and its generalization, by which what a
memory removes and what it adds have keys and strengths of their own (RWKV-7), and the mLSTM, whose exponential gates
have a level that is subtracted from all exponents, and may fall again.
"""

from collections.abc import Callable
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.nn.linear import fla_recurrence, linear_attention, matrix_recurrence
from manyformer.nn.linear.decay_gates import DecayGate, SoftplusDecay
from manyformer.nn.linear.matrix_recurrence import Removal
from manyformer.nn.linear.memory_rules import MemoryResult, MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.nn.ops.document_rows import decayed_running_max
from manyformer.nn.positions.content_positions import capped
from manyformer.nn.runtime.head_selection import HeadProjection, HeadSelection, PerHeadTensors, select_entries
from manyformer.nn.runtime.training_hooks import UndecayedParameters

EPSILON = 1e-6
"""Added to the divisor of an output."""


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
        # the strength is the last channel, whatever the decay has
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


@final
class StateSpaceRule(MemoryRule, PerHeadTensors):
    """S_t = exp(-a dt_t) S_(t-1) + dt_t B_t x_t^T, y_t = S_t^T C_t + D x_t, with keys B, queries C, values x.

    Dao and Gu 2024 (arXiv:2405.21060), section 7: steps dt are softplus of a gate, a and the skip D numbers of a head.
    """

    gate_dim = 1
    forms = frozenset({"quadratic", "chunked", "recurrent", "fla"})

    def __init__(self, heads: int, gate_projection: HeadProjection) -> None:
        super().__init__()
        self.gate_projection = gate_projection
        self.decay = SoftplusDecay(heads)
        self.skip = nn.Parameter(torch.ones(heads))

    @property
    def has_decay_per_head(self) -> bool:
        return True

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        gate = gates_of(tokens)
        decay = mask_padding(self.decay(gate), tokens.valid)
        values = mask_padding(self.decay.steps(gate) * tokens.v, tokens.valid)
        result = decayed_sum(tokens._replace(v=values), decay, memory, form=form, chunk=chunk)
        # the skip reads the values themselves, not what a step size has made of them
        return MemoryResult(result.y + self.skip[:, None, None] * tokens.v, result.memory, result.weights)

    @property
    def differs_by_head(self) -> bool:
        return True

    def keep_heads(self, selection: HeadSelection) -> None:
        select_entries(self, "skip", selection.heads, 0)


@final
class DecayBounds(nn.Module, UndecayedParameters):
    """Lower bounds of decays that rise from layer to layer, from 0 in the first: sums of a softmax over layers.

    Qin et al. 2023 (HGRN, arXiv:2311.04823), section 3.2; all layers share the module."""

    undecayed = ("logits",)

    def __init__(self, depth: int, heads: int, width: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(depth, heads * width))
        self.heads = heads

    def of_layer(self, number: int) -> Float[Tensor, "h 1 e"]:
        """The bounds of the channels of all heads in a layer."""
        shares = self.logits.softmax(0)
        # the share of the first layer is left out, so that its bound is 0 and that of the last below 1
        return shares[1 : number + 1].sum(0).view(self.heads, 1, -1)


@final
class TiedDecayRule(MemoryRule):
    """S_t = diag(f_t) S_(t-1) + (1 - f_t) v_t^T, f_t = bound + (1 - bound) sigmoid(x_t), x_t the layer's projected key.

    Qin et al. 2024 (HGRN2, arXiv:2404.07904), section 3.2. Bounds are those of layer `number`, 0 in the first."""

    forms = frozenset({"quadratic", "chunked", "recurrent", "fla"})

    def __init__(self, bounds: DecayBounds, number: int) -> None:
        super().__init__()
        self.bounds = bounds
        self.number = number

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        decay = F.logsigmoid(tokens.key_features)
        if self.number:
            bound = self.bounds.of_layer(self.number)
            # log(bound + (1 - bound) sigmoid) without leaving the logarithm, so that decays near 0 keep their digits
            decay = torch.logaddexp(bound.log(), torch.log1p(-bound) + decay)
        decay = mask_padding(decay, tokens.valid)
        # 1 - exp(decay) without cancellation; it is 0 at padding
        tokens = tokens._replace(key_features=-torch.expm1(decay))
        return decayed_sum(tokens, decay, memory, form=form, chunk=chunk)

    def extra_repr(self) -> str:
        return f"layer {self.number}"


@final
class GeneralizedDeltaRule(MemoryRule):
    """S_t = D_t S_(t-1) - (a_t * c_t) c_t^T S_(t-1) + k_t v_t^T, read as S_t^T q_t.

    Peng et al. 2025 (RWKV-7, arXiv:2503.14456), section 4. Gates of a token are the logarithm of its decay D, its
    removal key c, of length 1, and its rates a, of `width` channels each. Decay and removal act on the same memory,
    side by side: Kimi Delta Attention decays first."""

    forms = frozenset({"chunked", "recurrent"})

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_dim = 3 * width

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        decay, removal_key, rate = gates_of(tokens).chunk(3, -1)
        decay = mask_padding(decay, tokens.valid)
        key = mask_padding(tokens.key_features, tokens.valid)
        # masked on the side that writes: what padding reads does not matter
        removed = mask_padding(rate * removal_key, tokens.valid)
        removal = Removal(removal_key, removed)
        inputs = tokens.query_features, key, tokens.v, decay, tokens.run, memory.matrix
        if form == "chunked":
            y, matrix = matrix_recurrence.chunked(*inputs, removal=removal, chunk=chunk)
        else:
            y, matrix = matrix_recurrence.recurrent(*inputs, removal=removal)
        return MemoryResult(y, RecurrentMemory(matrix))


@final
class MatrixLSTMRule(MemoryRule, PerHeadTensors):
    """S_t = f_t S_(t-1) + exp(i_t) k_t v_t^T, n_t = f_t n_(t-1) + exp(i_t) k_t, y_t = S_t^T q_t / max(|n_t q_t|, 1).

    Beck et al. 2024 (xLSTM, arXiv:2405.04517), section 2.3, f a sigmoid. All are stored divided by exp(m), with the
    level m_t = max(log f_t + m_(t-1), i_t), 0 before any token: without the decay of the level a large gate would
    forever scale later tokens down to nothing. The 1 under the fraction is exp(-m) then. With `gate_cap` gates x
    become cap tanh(x / cap) (xLSTM 7B, Beck et al. 2025, arXiv:2503.13427). Biases begin at -10 for i and from 3 to
    6 for the heads' f, as there."""

    gate_dim = 2
    forms = frozenset({"quadratic", "chunked", "recurrent"})
    head_axes = (("input_bias", -1), ("forget_bias", -1))

    def __init__(self, heads: int, gate_projection: GateProjections, *, gate_cap: float | None = 15.0) -> None:
        super().__init__()
        self.gate_projection = gate_projection
        self.gate_cap = gate_cap
        self.input_bias = nn.Parameter(torch.full((heads,), -10.0))
        self.forget_bias = nn.Parameter(torch.linspace(3.0, 6.0, heads))

    def forward(
        self, tokens: TokenFeatures, memory: RecurrentMemory, *, form: RecurrenceForm, chunk: int, floor: float
    ) -> MemoryResult:
        gate = gates_of(tokens)
        v = tokens.v
        input_gate, decay = self._gates(gate, tokens.valid)
        if memory.log_scale is None:
            initial_level = v.new_zeros(v.shape[:2])
        else:
            initial_level = memory.log_scale
        # the level cancels, so that it needs no gradient
        level = decayed_running_max(input_gate.detach(), decay.detach(), tokens.run, initial_level)
        scale = (input_gate - level).exp()[..., None]
        previous = torch.cat([initial_level[..., None], level[..., :-1]], -1)
        # the exact difference of levels first: what remains, of either sign, makes up for the rounding of the level
        decay = (decay + (previous - level))[..., None]
        # the normalizer n is the memory of a value that is always 1
        columns = F.pad(v, (0, 1), value=1.0) * scale
        y, memory, weights = decayed_sum(tokens._replace(v=columns), decay, memory, form=form, chunk=chunk)
        divisor = y[..., -1:].abs().maximum((-level).exp()[..., None]) + EPSILON
        if weights is not None:
            weights = weights * scale.mT / divisor
        # a copy: a view would keep the levels of all tokens alive
        return MemoryResult(y[..., :-1] / divisor, RecurrentMemory(memory.matrix, level[..., -1].clone()), weights)

    def _gates(self, gate: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor]:
        """The logarithms (b, h, l) of the input gate and of the forget gate; padding neither writes nor decays."""
        biases = torch.stack([self.input_bias, self.forget_bias], -1)[:, None]
        if self.gate_cap is None:
            gate = gate + biases
        else:
            gate = capped(gate + biases, self.gate_cap)
        input_gate = gate[..., 0]
        decay = F.logsigmoid(gate[..., 1])
        if valid is None:
            return input_gate, decay
        return input_gate.masked_fill(~valid[:, None], -torch.inf), decay.masked_fill(~valid[:, None], 0.0)

    def extra_repr(self) -> str:
        return f"gate_cap={self.gate_cap}"


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
