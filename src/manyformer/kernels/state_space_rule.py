"""Mamba-2's rule: a step size decides how much a memory decays and how much of a token it takes up."""

from typing import final

import torch
from torch import nn

from manyformer.head_selection import HeadProjection, HeadSelection, PerHeadTensors, select_entries
from manyformer.kernels.decay_gates import SoftplusDecay
from manyformer.kernels.memory_rules import MemoryResult, MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.kernels.recurrent_rules import decayed_sum, gates_of, mask_padding


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
        return MemoryResult(result.y + self.skip[:, None, None] * tokens.v, result.memory, result.weights)

    @property
    def differs_by_head(self) -> bool:
        return True

    def keep_heads(self, selection: HeadSelection) -> None:
        select_entries(self, "skip", selection.heads, 0)
