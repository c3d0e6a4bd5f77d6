"""The rule of the mLSTM: exponential gates whose level is subtracted from all exponents, and may fall again."""

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from manyformer.head_selection import PerHeadTensors
from manyformer.kernels.memory_rules import MemoryResult, MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.kernels.recurrent_rules import GateProjections, decayed_sum, gates_of
from manyformer.ops.document_rows import decayed_running_max
from manyformer.position.content_positions import capped

EPSILON = 1e-6
"""Added to the divisor of an output."""


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
            before = v.new_zeros(v.shape[:2])
        else:
            before = memory.log_scale
        # the level cancels, so that it needs no gradient
        level = decayed_running_max(input_gate.detach(), decay.detach(), tokens.run, before)
        scale = (input_gate - level).exp()[..., None]
        previous = torch.cat([before[..., None], level[..., :-1]], -1)
        # the exact difference of levels first: what remains, of either sign, makes up for the rounding of the level
        decay = (decay + (previous - level))[..., None]
        columns = F.pad(v, (0, 1), value=1.0) * scale
        y, memory, weights = decayed_sum(tokens._replace(v=columns), decay, memory, form=form, chunk=chunk)
        divisor = y[..., -1:].abs().maximum((-level).exp()[..., None]) + EPSILON
        if weights is None:
            weights = None
        else:
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
