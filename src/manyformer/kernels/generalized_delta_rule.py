"""RWKV-7's rule: what a memory removes and what it adds have keys and strengths of their own."""

from typing import final

from manyformer.kernels.memory_rules import MemoryResult, MemoryRule, RecurrenceForm, RecurrentMemory, TokenFeatures
from manyformer.kernels.recurrent_rules import gates_of, mask_padding
from manyformer.ops import matrix_recurrence
from manyformer.ops.matrix_recurrence import Removal


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
        removed = mask_padding(rate * removal_key, tokens.valid)
        removal = Removal(removal_key, removed)
        inputs = tokens.query_features, key, tokens.v, decay, tokens.run, memory.matrix
        if form == "chunked":
            y, matrix = matrix_recurrence.chunked(*inputs, removal=removal, chunk=chunk)
        else:
            y, matrix = matrix_recurrence.recurrent(*inputs, removal=removal)
        return MemoryResult(y, RecurrentMemory(matrix))
